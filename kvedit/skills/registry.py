"""Every skill of one server, and the moves between their states.

    declare ----> COMPILING --compiled--> READY --evicted--> EVICTED --recompile--> COMPILING
                      `--failed--> FAILED (first compile) or EVICTED (a later one)
    broken: as failed, from READY too (something else went wrong at the end of the compile)
    replace, retire: any but FAILED -> RETIRED --declare with the same content--> COMPILING
    purge; FAILED and replaced or retired; RETIRED, ``retired_max`` used later or a new epoch: gone

Each tensor parallel rank holds one registry and feeds it the same calls in the same order, so
nothing here reads a clock or a random number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvedit.checks import check_name, check_seam
from kvedit.errors import BadRequest, Conflict, NotFound
from kvedit.skills.declaration import SkillDeclaration
from kvedit.skills.segment import Segment, Skill, State
from kvedit.skills.shelf import Shelf, unknown

RecompileOutcome = Literal["compile", "busy", "gone", "ready"]


@dataclass(frozen=True, slots=True)
class Declared:
    """``compile``: the caller now sends the compile request that ``skill.rid`` names."""

    outcome: Literal["exists", "compile"]
    skill: Skill


class Registry(Shelf):
    """The moves between states. A state changes here, and where a shelf drops a skill."""

    # ---- declaring

    def declare(self, declaration: SkillDeclaration, rid: str) -> Declared:
        """Register content under a name, or find it registered.

        Raises BadRequest (name, seam, no tokens), Conflict (other content and no ``replace``, or
        a ``rid`` in flight).
        """
        name, ids = declaration.name, declaration.token_ids
        check_name(name)
        check_seam(declaration.seam, len(ids))
        self._check_new_rid(rid)
        if not ids:
            raise BadRequest(f"kvedit: skill {name!r}: expected at least 1 token, got 0")
        current = self._current.get(declaration.key)
        same = current is not None and current.segment.has_content(declaration)
        if current is not None and not same and not declaration.replace:
            raise Conflict(
                f"kvedit: skill {name!r}: expected the content of version "
                f"{current.segment.version} or replace=true, got other content"
            )
        if current is not None and same:
            skill = current
        else:
            if current is not None:
                self._retire(current)
            skill = self._revive(declaration) or self._create(declaration)
            self._trim_retired()
        skill.pin, skill.memory = declaration.pin, declaration.memory
        self._set_seam(skill, declaration.seam)
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
            skill.state = State.READY
            skill.failed_reason = None
            if skill.stale:
                self.evicted(skill.number)
        skill.stale = False
        return skill

    def failed(self, rid: str, reason: str) -> Skill:
        """The compile request did not finish. A skill that was ready before stays matchable."""
        skill = self._land(rid)
        if skill.state is State.COMPILING:
            self._fail(skill, reason)
        skill.stale = False
        return skill

    def broken(self, skill: Skill, reason: str) -> None:
        """Something went wrong while its compile came to an end, however far that had come: as
        if the compile had not finished."""
        if skill.rid is not None:
            self.failed(skill.rid, reason)
        elif skill.state is State.READY:
            skill.pinned = False
            self._fail(skill, reason)

    # ---- losing KV

    def evicted(self, number: int) -> None:
        """The cache dropped the KV of this segment. A segment already gone is no error."""
        skill = self._skills.get(number)
        if skill is None:
            return
        skill.pinned = False
        if skill.state is State.READY:
            skill.state, skill.was_ready = State.EVICTED, True

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
            raise unknown(name)
        self._retire(skill)
        self._trim_retired()
        return skill

    def purge(self, name: str, namespace: str) -> list[Segment]:
        """Drop all segments of exactly this name and namespace, also retired. Raises NotFound."""
        doomed = list(self._of_key((namespace, name)))
        if not doomed:
            raise unknown(name)
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

    def _revive(self, declaration: SkillDeclaration) -> Skill | None:
        """A retired segment with this very content comes back under its number. A second
        segment would never win a match against it: on a tie the lowest number wins."""
        for skill in self._of_key(declaration.key):
            if skill.state is State.RETIRED and skill.segment.has_content(declaration):
                # a compile that was in flight when it was retired is still the compile
                skill.state = State.COMPILING if skill.rid is not None else State.EVICTED
                self._current[declaration.key] = skill
                return skill
        return None

    def _start_compile(self, skill: Skill, rid: str) -> None:
        if skill.state is State.FAILED:
            self._start_matching(skill)
        skill.state = State.COMPILING
        skill.rid = rid
        skill.stale = False
        self._in_flight[rid] = skill

    def _fail(self, skill: Skill, reason: str) -> None:
        skill.state = State.EVICTED if skill.was_ready else State.FAILED
        skill.failed_reason = reason
        if skill.state is State.FAILED:
            self._stop_matching(skill)

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
            skill.was_ready = skill.was_ready or skill.state is State.READY
            skill.state = State.RETIRED
            skill.pin = False

    def _trim_retired(self) -> None:
        retired = [s for s in self._skills.values() if s.state is State.RETIRED]
        num_over = len(retired) - self._retired_max
        if num_over > 0:
            for skill in sorted(retired, key=lambda s: (s.last_used, s.number))[:num_over]:
                self._drop(skill)

    def _check_new_rid(self, rid: str) -> None:
        if rid in self._in_flight:
            raise Conflict(f"kvedit: compile: expected a new request id, got {rid!r} in flight")
