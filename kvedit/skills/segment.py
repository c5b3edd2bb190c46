"""What a skill is: an immutable segment of token ids, and the state its KV is in."""

from __future__ import annotations

import enum
from array import array
from dataclasses import dataclass

from kvedit.reason import Reason
from kvedit.skills.declaration import SkillDeclaration


class State(str, enum.Enum):
    """Of a skill's KV; ``kvedit.skills.registry`` draws the moves."""

    COMPILING = "compiling"  # its compile request is announced or runs
    READY = "ready"  # KV is in the cache, splices may copy it
    EVICTED = "evicted"  # KV was dropped; served plainly until it is recompiled
    RETIRED = "retired"  # replaced or deleted: cached paths stay, no new splice
    FAILED = "failed"  # its first compile did not finish

    def __str__(self) -> str:
        return self.value


# why nothing new is composed from a skill that is not ready
WHY_NOT_READY = {
    State.COMPILING: Reason.COMPILING,
    State.EVICTED: Reason.EVICTED,
    State.RETIRED: Reason.RETIRED,
    State.FAILED: Reason.FAILED,
}


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Segment:
    """One content of one skill. ``number`` names it in plans and is never used again."""

    number: int  # from 1
    name: str
    namespace: str  # a namespace tag, or SHARED
    token_ids: array[int]  # int64
    compile_prefix: array[int]  # int64, prefilled in front of token_ids and dropped
    version: int  # from 1, per name and namespace
    seam: int | None  # tokens recomputed at the front; None: the server's default
    identity: str

    @property
    def num_tokens(self) -> int:
        """Without the compile prefix."""
        return len(self.token_ids)

    def has_content(self, declaration: SkillDeclaration) -> bool:
        """Whether token ids and compile prefix are the same; seam and flags do not count."""
        mine = self.token_ids, self.compile_prefix
        return mine == (declaration.token_ids, declaration.compile_prefix)


@dataclass(slots=True, eq=False, kw_only=True)
class Skill:
    """A segment and what is known about its KV. The registry changes one; ``pinned`` is also set by
    whoever takes and gives back the pin's lock."""

    segment: Segment
    state: State = State.COMPILING
    pin: bool = False  # the caller asked for a pin
    memory: bool = False  # its text may hold declared fields
    pinned: bool = False  # the cache holds the lock now
    rid: str | None = None  # compile request in flight
    stale: bool = False  # that compile began before a flush: its KV must not be used
    was_ready: bool = False  # it has left READY: conversations may hold paths that name it
    num_uses: int = 0
    last_used: int = 0  # logical clock of the registry
    failed_reason: str | None = None

    @property
    def number(self) -> int:
        """Of its segment; a new one when the registry renumbers it."""
        return self.segment.number

    @property
    def matchable(self) -> bool:
        """Prompts are searched for it (whether a match may be spliced is ``state``'s matter)."""
        return self.state is not State.FAILED
