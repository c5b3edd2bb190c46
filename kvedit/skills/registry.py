"""Every skill of one server, and the moves between their states.

    declare ----> COMPILING --compiled--> READY --evicted--> EVICTED --recompile--> COMPILING
                      `--failed--> FAILED (first compile) or EVICTED (a later one)
    replace, retire: any of them -> RETIRED --declare with the same content--> COMPILING
    purge, or more than ``retired_max`` retired: gone

Each tensor parallel rank holds one registry and feeds it the same calls in the same order, so
nothing here reads a clock or a random number.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from kvedit.checks import check_ids, check_name, check_seam
from kvedit.errors import BadRequest, Conflict, NotFound
from kvedit.identity import segment_identity
from kvedit.namespace import SHARED
from kvedit.skills.matcher import MAX_SKIPPED_TOKENS, Matcher
from kvedit.skills.segment import Segment, Skill, State

__all__ = [
    "Declared",
    "Registry",
    "Segment",
    "Skill",
    "State",
    "check_ids",
    "check_name",
    "check_seam",
]

Decode: TypeAlias = "Callable[[array[int]], str]"  # array takes no [int] at run time
Key = tuple[str, str]  # (namespace, name)
RecompileOutcome = Literal["compile", "busy", "gone", "ready"]


@dataclass(frozen=True, slots=True)
class Declared:
    """``compile``: the caller now sends the compile request that ``skill.rid`` names."""

    outcome: Literal["exists", "compile"]
    skill: Skill


class Registry:
    """``host_identity`` names all that shapes KV besides tokens; ``retired_max`` >= 0.

    ``decode`` turns ids into text, special tokens kept; without it a match never skips tokens at
    a skill's edge. ``matcher`` holds exactly the matchable segments; only the registry feeds it.
    """

    def __init__(self, host_identity: str, retired_max: int, decode: Decode | None = None) -> None:
        self.version = 0  # changes with the set of matchable segments or their seams
        self.matcher = Matcher()
        self._decode = decode
        self._host_identity = host_identity
        self._retired_max = retired_max
        self._skills: dict[int, Skill] = {}
        self._current: dict[Key, Skill] = {}
        self._in_flight: dict[str, Skill] = {}  # by rid; also skills dropped meanwhile
        self._dropped: list[Segment] = []
        self._last_number = 0
        self._clock = 0

    # ---- reading

    def get(self, name: str, namespace: str) -> Skill:
        """The current skill of that name: the namespace's own, else the shared one."""
        for owner in (namespace, SHARED):
            skill = self._current.get((owner, name))
            if skill is not None:
                return skill
        raise _unknown(name)

    def named(self, name: str, namespace: str) -> Skill:
        """The newest skill of exactly this name and namespace, retired ones included."""
        skills = list(self._of_key((namespace, name)))
        if not skills:
            raise _unknown(name)
        return self._current.get((namespace, name), skills[-1])

    def find(self, name: str, namespace: str) -> int | None:
        """Segment number of the current skill of exactly this name and namespace."""
        skill = self._current.get((namespace, name))
        return None if skill is None else skill.number

    def by_number(self, number: int) -> Skill | None:
        return self._skills.get(number)

    def by_rid(self, rid: str) -> Skill | None:
        """Whose compile request this is. Answers for retired and dropped skills too, so that
        a compile request never passes for an ordinary one."""
        return self._in_flight.get(rid)

    def all(self) -> list[Skill]:
        """In order of segment number."""
        return list(self._skills.values())

    def listed(self, namespace: str) -> list[Skill]:
        """What a caller of ``namespace`` may see: its own and the shared ones, every state."""
        return [s for s in self.all() if s.segment.namespace in (namespace, SHARED)]

    def matchable(self, namespace: str) -> list[Skill]:
        return [s for s in self.listed(namespace) if s.matchable]

    # ---- declaring

    def declare(
        self,
        *,
        name: str,
        namespace: str,
        token_ids: array[int],
        compile_prefix: array[int],
        seam: int | None,
        pin: bool,
        replace: bool,
        rid: str,
        memory: bool = False,
    ) -> Declared:
        """Register content under a name, or find it registered.

        Raises BadRequest (name, seam, no tokens), Conflict (other content and no ``replace``, or
        a ``rid`` in flight).
        """
        check_name(name)
        check_seam(seam, len(token_ids))
        self._check_new_rid(rid)
        if not token_ids:
            raise BadRequest(f"kvedit: skill {name!r}: expected at least 1 token, got 0")
        current = self._current.get((namespace, name))
        same = current is not None and current.segment.has_content(token_ids, compile_prefix)
        if current is not None and not same and not replace:
            raise Conflict(
                f"kvedit: skill {name!r}: expected the content of version "
                f"{current.segment.version} or replace=true, got other content"
            )
        if current is not None and same:
            skill = current
        else:
            if current is not None:
                self._retire(current)
            skill = self._revive((namespace, name), token_ids, compile_prefix) or self._create(
                (namespace, name), token_ids, compile_prefix
            )
            self._trim_retired()
        skill.pin, skill.memory = pin, memory
        self._set_seam(skill, seam)
        if skill.state in (State.READY, State.COMPILING):
            return Declared("exists", skill)
        self._start_compile(skill, rid)
        return Declared("compile", skill)

    def recompile(self, number: int, rid: str) -> RecompileOutcome:
        """Start the compile of an evicted skill, unless one runs or nobody wants it any more."""
        self._check_new_rid(rid)
        skill = self._skills.get(number)
        if skill is None or skill.state in (State.RETIRED, State.FAILED):
            return "gone"
        if skill.state is State.COMPILING:
            return "busy"
        if skill.state is State.READY:
            return "ready"
        self._start_compile(skill, rid)
        return "compile"

    # ---- what happened to a compile request

    def compiled(self, rid: str) -> Skill:
        """The compile request finished. Look at ``state``: a skill that was retired meanwhile
        stays so, and one whose compile began before a flush is evicted, not ready."""
        skill = self._land(rid)
        if skill.state is State.COMPILING:
            skill.state = State.EVICTED if skill.stale else State.READY
            skill.was_ready = True
            skill.failed_reason = None
        skill.stale = False
        return skill

    def failed(self, rid: str, reason: str) -> Skill:
        """The compile request did not finish. A skill that was ready before stays matchable."""
        skill = self._land(rid)
        if skill.state is State.COMPILING:
            skill.state = State.EVICTED if skill.was_ready else State.FAILED
            skill.failed_reason = reason
            if skill.state is State.FAILED:
                self._stop_matching(skill)
        skill.stale = False
        return skill

    # ---- losing KV

    def evicted(self, number: int) -> None:
        """The cache dropped the KV of this segment. A segment already gone is no error."""
        skill = self._skills.get(number)
        if skill is None:
            return
        skill.pinned = False
        if skill.state is State.READY:
            skill.state = State.EVICTED

    def evict_all(self) -> None:
        """The cache was flushed, or its KV no longer fits the weights."""
        for skill in self._skills.values():
            self.evicted(skill.number)
        for skill in self._in_flight.values():
            skill.stale = True

    def new_epoch(self, host_identity: str) -> None:
        """Weights, adapters or whatever else shapes KV changed: new identities, no KV.

        Every segment gets a new number, so that no path cached under the old one is found again
        (the host may keep its tree across a weight update). Retired segments are dropped.
        """
        self._host_identity = host_identity
        self.evict_all()
        for skill in self.all():
            if skill.state is State.RETIRED:
                self._drop(skill)
            else:
                self._renumber(skill)

    def renumber(self, number: int) -> None:
        """Cached paths of this segment are not to be trusted: give it a new number, evicted."""
        self.evicted(number)
        skill = self._skills.get(number)
        if skill is not None:
            self._renumber(skill)

    # ---- leaving

    def retire(self, name: str, namespace: str) -> Skill:
        """Take the current skill of exactly this namespace out of use. Raises NotFound."""
        skill = self._current.get((namespace, name))
        if skill is None:
            raise _unknown(name)
        self._retire(skill)
        self._trim_retired()
        return skill

    def purge(self, name: str, namespace: str) -> list[Segment]:
        """Drop every segment of that name, retired ones too. Raises NotFound."""
        doomed = list(self._of_key((namespace, name)))
        if not doomed:
            raise _unknown(name)
        for skill in doomed:
            self._drop(skill)
        gone = [skill.segment for skill in doomed]
        self._dropped = [s for s in self._dropped if s not in gone]
        return gone

    def drain_dropped(self) -> list[Segment]:
        """Segments that left without a purge since the last call; the cache forgets them."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def touch(self, number: int) -> None:
        """A request uses this segment. A segment already gone is no error."""
        skill = self._skills.get(number)
        if skill is not None:
            skill.num_uses += 1
            skill.last_used = self._tick()

    # ---- inside

    def _create(self, key: Key, token_ids: array[int], compile_prefix: array[int]) -> Skill:
        self._last_number += 1
        namespace, name = key
        segment = Segment(
            number=self._last_number,
            name=name,
            namespace=namespace,
            token_ids=token_ids[:],  # the caller keeps its own array
            compile_prefix=compile_prefix[:],
            version=1 + max((s.segment.version for s in self._of_key(key)), default=0),
            seam=None,
            identity=self._identity(namespace, token_ids, compile_prefix),
        )
        skill = Skill(segment=segment, state=State.EVICTED, last_used=self._tick())
        self._skills[segment.number] = self._current[key] = skill
        self._start_matching(skill)
        return skill

    def _revive(self, key: Key, token_ids: array[int], compile_prefix: array[int]) -> Skill | None:
        """A retired segment with this very content comes back under its number. A second
        segment would never win a match against it: on a tie the lowest number wins."""
        for skill in self._of_key(key):
            if skill.state is State.RETIRED and skill.segment.has_content(
                token_ids, compile_prefix
            ):
                # a compile that was in flight when it was retired is still the compile
                skill.state = State.COMPILING if skill.rid is not None else State.EVICTED
                self._current[key] = skill
                return skill
        return None

    def _renumber(self, skill: Skill) -> None:
        old = skill.segment
        matched = old.number in self.matcher
        if matched:
            self._stop_matching(skill)
        del self._skills[old.number]
        self._last_number += 1
        skill.segment = dataclasses.replace(
            old,
            number=self._last_number,
            identity=self._identity(old.namespace, old.token_ids, old.compile_prefix),
        )
        self._skills[skill.number] = skill
        if matched:
            self._start_matching(skill)

    def _start_compile(self, skill: Skill, rid: str) -> None:
        if skill.state is State.FAILED:
            self._start_matching(skill)
        skill.state = State.COMPILING
        skill.rid = rid
        skill.stale = False
        self._in_flight[rid] = skill

    def _start_matching(self, skill: Skill) -> None:
        self.matcher.add(skill.segment, self._head_texts(skill.segment))
        self.version += 1

    def _stop_matching(self, skill: Skill) -> None:
        self.matcher.remove(skill.number)
        self.version += 1

    def _head_texts(self, segment: Segment) -> list[str]:
        if self._decode is None:
            return [""]
        num_heads = min(MAX_SKIPPED_TOKENS, segment.num_tokens) + 1
        return [self._decode(segment.token_ids[:e]) if e else "" for e in range(num_heads)]

    def _land(self, rid: str) -> Skill:
        skill = self._in_flight.pop(rid, None)
        if skill is None:
            raise NotFound(f"kvedit: compile: expected a request id in flight, got {rid!r}")
        skill.rid = None
        return skill

    def _retire(self, skill: Skill) -> None:
        del self._current[(skill.segment.namespace, skill.segment.name)]
        if skill.state is State.FAILED:  # no KV, no cached path: nothing to keep
            self._drop(skill)
        else:
            skill.state = State.RETIRED
            skill.pin = False

    def _trim_retired(self) -> None:
        retired = [s for s in self._skills.values() if s.state is State.RETIRED]
        num_over = len(retired) - self._retired_max
        if num_over > 0:
            for skill in sorted(retired, key=lambda s: (s.last_used, s.number))[:num_over]:
                self._drop(skill)

    def _drop(self, skill: Skill) -> None:
        del self._skills[skill.number]
        key = (skill.segment.namespace, skill.segment.name)
        if self._current.get(key) is skill:
            del self._current[key]
        if skill.state is not State.FAILED:
            skill.state = State.RETIRED  # a compile still in flight must not make it ready
            self._stop_matching(skill)
        self._dropped.append(skill.segment)

    def _set_seam(self, skill: Skill, seam: int | None) -> None:
        if seam is not None and seam != skill.segment.seam:
            skill.segment = dataclasses.replace(skill.segment, seam=seam)
            self.version += 1  # plans depend on it

    def _check_new_rid(self, rid: str) -> None:
        if rid in self._in_flight:
            raise Conflict(f"kvedit: compile: expected a new request id, got {rid!r} in flight")

    def _identity(self, namespace: str, token_ids: array[int], prefix: array[int]) -> str:
        return segment_identity(
            token_ids=token_ids,
            compile_prefix=prefix,
            namespace=namespace,
            host=self._host_identity,
        )

    def _of_key(self, key: Key) -> Iterator[Skill]:
        return (s for s in self.all() if (s.segment.namespace, s.segment.name) == key)

    def _tick(self) -> int:
        self._clock += 1
        return self._clock


def _unknown(name: str) -> NotFound:
    return NotFound(f"kvedit: skill {name[:200]!r}: expected a registered name, got an unknown one")
