"""The planner: token ids and a registry in, spans and refusals out. Pure; acts on nothing."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from kvedit.reason import Reason
from kvedit.request.options import Options
from kvedit.skills.matcher import ANCHOR_TOKENS, Match
from kvedit.skills.registry import Registry
from kvedit.skills.segment import Segment, State
from kvedit.splice.sources import SkillSource
from kvedit.splice.spans import Plan, Refusal, Span, Worth

MAX_OLDER_LAYERS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLimits:
    """What the server and the request allow. Positions and lengths in tokens."""

    page_size: int
    min_span_tokens: int
    default_seam: int
    last_position: int  # spans end at or before it (the prompt's last token is always forwarded)
    boundary_tokens: int = 0  # price of a forced chunk boundary


def plan_spans(
    ids: array[int],
    registry: Registry,
    namespace: str,
    options: Options,
    limits: PlanLimits,
    tail_text: Callable[[int, int], str],
) -> Plan:
    """Recognise the namespace's skills in ``ids`` and lay spans over them.

    Ascending, disjoint, page-aligned (start up, stop down). A span that directly follows a
    composed one has seam 0: its predecessor's last token is composed, there is nothing real to
    repair against. ``options.skills`` restricts the skills; unknown names become refusals.
    ``tail_text(a, b)`` decodes ids[a:b).
    """
    if options.splice == "off":
        return Plan(num_tokens=len(ids), registry_version=registry.version)
    visible = [s for s in registry.matchable(namespace) if _wanted(s.segment, options)]
    live = {s.number for s in visible if s.state is not State.RETIRED}
    layer = _Layer(ids, registry, namespace, options, limits, tail_text)
    spans, refused = layer.lay(live)
    everything = {s.number for s in visible}
    history: list[Span] = []
    if len(live) < len(visible):
        history, _ = layer.lay(everything)
    found = {s.skill for s in (*spans, *history)} | {r.skill for r in refused}
    absent = [name for name in options.skills or () if name not in found]
    named = [Refusal(skill=n, reason=_absence(registry, namespace, n)) for n in absent]
    return Plan(
        num_tokens=len(ids),
        registry_version=registry.version,
        spans=tuple(spans),
        history=tuple(history) if history != spans else (),
        older=tuple(tuple(spans) for spans in layer.without_newcomers(everything)),
        refused=tuple(refused + named),
        worth=worth_of(options, limits),
    )


def worth_of(options: Options, limits: PlanLimits) -> Worth:
    """A request that requires reuse gets it at any price."""
    is_required = "require" in (options.splice, options.edits)
    return Worth(
        boundary=0 if is_required else limits.boundary_tokens,
        min_saving=1 if is_required else limits.min_span_tokens,
    )


@dataclass(frozen=True, slots=True)
class _Layer:
    """Lays the spans of some segments over one prompt."""

    ids: array[int]
    registry: Registry
    namespace: str
    options: Options
    limits: PlanLimits
    tail_text: Callable[[int, int], str]
    _found: dict[tuple[int, int, frozenset[int]], list[Match]] = field(default_factory=dict)

    def lay(self, numbers: Collection[int]) -> tuple[list[Span], list[Refusal]]:
        spans: list[Span] = []
        refused: list[Refusal] = []
        for match in self._find(0, len(self.ids), numbers):
            skill = self.registry.by_number(match.number)
            if skill is None:
                continue
            follows = bool(spans) and spans[-1].stop == match.prompt_start
            seam = 0 if follows else _seam(skill.segment, self.options, self.limits)
            span = _lay(skill.segment, match, seam, self.limits)
            refused += _partial(skill.segment, match, len(self.ids))
            if isinstance(span, Refusal):
                refused.append(span)
            else:
                spans.append(span)
        return spans, refused

    def without_newcomers(self, numbers: Collection[int]) -> list[list[Span]]:
        """The spans as they lay before a segment was registered that overlaps an older one.

        A conversation that began under the older one finds its path by these. Costs a second
        look at the matched parts of the prompt and, where there is an overlap, one at all of it.
        """
        layers: list[list[Span]] = []
        matches = self._find(0, len(self.ids), numbers)
        for match in sorted(matches, key=lambda m: m.number, reverse=True):
            older = {number for number in numbers if number < match.number}
            stop = match.prompt_start + match.num_tokens + ANCHOR_TOKENS - 1
            if self._find(match.prompt_start, stop, older):
                spans, _ = self.lay(older)
                if spans and spans not in layers:
                    layers.append(spans)
            if len(layers) == MAX_OLDER_LAYERS:
                break
        return layers

    def _find(self, start: int, stop: int, numbers: Collection[int]) -> list[Match]:
        """Matches of ``numbers`` in prompt tokens [start, stop), as positions behind ``start``."""
        if not numbers:
            return []
        asked = start, stop, frozenset(numbers)
        if asked not in self._found:  # the layers of one plan ask the same again
            self._found[asked] = self.registry.matcher.find(
                self.ids[start:stop],
                self.namespace,
                lambda a, b: self.tail_text(start + a, start + b),
                numbers,
            )
        return self._found[asked]


def _wanted(segment: Segment, options: Options) -> bool:
    return options.skills is None or segment.name in options.skills


def _seam(segment: Segment, options: Options, limits: PlanLimits) -> int:
    """The request's seam, else the skill's own, else the server's default."""
    if options.seam is not None:
        return options.seam
    if segment.seam is not None:
        return segment.seam
    return min(limits.default_seam, segment.num_tokens)  # nobody asked for more than there is


def _lay(segment: Segment, match: Match, seam: int, limits: PlanLimits) -> Span | Refusal:
    """Turn a match into a span: leave the seam out, keep to pages and to the last position."""
    page = limits.page_size
    base = match.prompt_start - match.skill_start
    # Tokens that only the merge at the edge differs in count as part of the seam.
    first = max(match.prompt_start, base + seam)
    match_stop = match.prompt_start + match.num_tokens
    # The donor's tree holds whole pages only.
    donor_stop = base + (len(segment.compile_prefix) + segment.num_tokens) // page * page
    donor_stop -= len(segment.compile_prefix)
    start = -(-first // page) * page
    stop = min(match_stop, donor_stop, limits.last_position) // page * page
    if seam > segment.num_tokens:
        detail = (("seam", seam), ("num_tokens", segment.num_tokens))
        return Refusal(skill=segment.name, reason=Reason.SEAM_TOO_LONG, detail=detail)
    if stop - start < limits.min_span_tokens:
        short = (("num_tokens", max(0, stop - start)),)
        return Refusal(skill=segment.name, reason=Reason.TOO_SHORT, detail=short)
    return Span(
        source=SkillSource(segment.number),
        skill=segment.name,
        match_start=match.prompt_start,
        start=start,
        stop=stop,
        base=base,
        prefix_len=len(segment.compile_prefix),
    )


def _partial(segment: Segment, match: Match, num_tokens: int) -> list[Refusal]:
    """``differs_at`` when the prompt leaves the skill's text before the skill ends."""
    skill_stop = match.skill_start + match.num_tokens
    at_prompt_end = match.prompt_start + match.num_tokens >= num_tokens
    if skill_stop >= segment.num_tokens or at_prompt_end:
        return []
    detail = (("index", skill_stop), ("position", match.prompt_start + match.num_tokens))
    return [Refusal(skill=segment.name, reason=Reason.DIFFERS_AT, detail=detail)]


def _absence(registry: Registry, namespace: str, name: str) -> Reason:
    """Why a named skill was not found in the prompt."""
    named = [s for s in registry.listed(namespace) if s.segment.name == name]
    current = [s for s in named if s.state is not State.RETIRED]
    if not current:
        return Reason.RETIRED if named else Reason.UNKNOWN_SKILL
    if all(s.state is State.FAILED for s in current):
        return Reason.FAILED
    short = all(s.segment.num_tokens < ANCHOR_TOKENS for s in current)
    return Reason.TOO_SHORT if short else Reason.NOT_IN_PROMPT
