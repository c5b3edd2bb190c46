"""Skills by number, name and compile request, and the matcher that is kept in step with them."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Callable, Iterator
from typing import TypeAlias

from kvedit.errors import NotFound
from kvedit.identity import segment_identity
from kvedit.namespace import SHARED
from kvedit.skills.declaration import SkillDeclaration
from kvedit.skills.matcher import MAX_SKIPPED_TOKENS, Matcher
from kvedit.skills.segment import Segment, Skill, State

Decode: TypeAlias = "Callable[[array[int]], str]"  # array takes no [int] at run time
Key = tuple[str, str]  # (namespace, name)


class Shelf:
    """``host_identity`` names all that shapes KV besides tokens; ``retired_max`` >= 0.

    ``decode`` turns ids into text, special tokens kept; without it a match never skips tokens at
    a skill's edge. ``matcher`` holds exactly the matchable segments; only a shelf feeds it.
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
        """The current skill: the namespace's own, else the shared one. Raises NotFound."""
        for owner in (namespace, SHARED):
            skill = self._current.get((owner, name))
            if skill is not None:
                return skill
        raise unknown(name)

    def named(self, name: str, namespace: str) -> Skill:
        """The current skill of exactly this name and namespace, else the newest retired one. Raises
        NotFound."""
        skills = list(self._of_key((namespace, name)))
        if not skills:
            raise unknown(name)
        return self._current.get((namespace, name), skills[-1])

    def find(self, name: str, namespace: str) -> int | None:
        """Segment number of the current skill of exactly this name and namespace."""
        skill = self._current.get((namespace, name))
        return None if skill is None else skill.number

    def by_number(self, number: int) -> Skill | None:
        """None: dropped, renumbered or never there."""
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
        """Those of ``listed`` that prompts are searched for: all but the failed ones."""
        return [s for s in self.listed(namespace) if s.matchable]

    # ---- keeping

    def _create(self, declaration: SkillDeclaration) -> Skill:
        self._last_number += 1
        ids, prefix = declaration.token_ids[:], declaration.compile_prefix[:]  # the caller's stay
        key = declaration.key
        segment = Segment(
            number=self._last_number,
            name=declaration.name,
            namespace=declaration.namespace,
            token_ids=ids,
            compile_prefix=prefix,
            version=1 + max((s.segment.version for s in self._of_key(key)), default=0),
            seam=None,
            identity=self._identity(declaration.namespace, ids, prefix),
        )
        skill = Skill(segment=segment, state=State.EVICTED, last_used=self._tick())
        self._skills[segment.number] = self._current[key] = skill
        self._start_matching(skill)
        return skill

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


def unknown(name: str) -> NotFound:
    """The error for a name that nothing is registered under."""
    return NotFound(f"kvedit: skill {name[:200]!r}: expected a registered name, got an unknown one")
