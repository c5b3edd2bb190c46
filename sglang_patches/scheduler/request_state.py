"""What kvedit knows about one request. Hangs on the host's Req as ``req.kvedit``."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
from sglang.srt.mem_cache.radix_cache import RadixKey

from kvedit.edit.client_prompt import ClientPrompt
from kvedit.edit.ledger import Found
from kvedit.edit.proofs import Claim
from kvedit.edit.variants import Variant
from kvedit.reason import Reason
from kvedit.request.options import Options
from kvedit.request.report import LineReport, PromptReport, UneditedReport
from kvedit.splice.pass_price import Lost
from kvedit.splice.spans import Pieces, Plan, Refusal, cut, served_ids
from kvedit.splice.spelling import Choice
from kvedit.splice.token_classes import TokenSplit
from sglang_patches.scheduler.handed import Handed

if TYPE_CHECKING:
    from sglang_patches.host.protocols import Request


@dataclass(slots=True)
class EditState:
    """What editing knows about one request.

    claim      what it may call its own, and where its turn will be kept
    weight_epoch   when it was planned: a turn that ends in another one is not recorded
    found      the earlier turns of its conversation, as they were when it came
    sent       the prompt as the client sent it; others: what may be served instead
    is_plain   every field is served by recompute
    chosen     the one that is served; is_frozen: it was admitted, so it stays
    max_new_tokens   as the host left it for the prompt that was sent
    """

    client: ClientPrompt
    claim: Claim
    weight_epoch: int
    found: Found
    sent: Variant
    others: tuple[Variant, ...] = ()
    is_plain: bool = False
    chosen: Variant = field(init=False)
    is_frozen: bool = False
    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        self.chosen = self.sent

    @property
    def line_intervals(self) -> list[tuple[int, int]]:
        return [(line.start, line.stop) for line in self.chosen.new_lines]

    @property
    def kind(self) -> str:
        """What was done, for the counters."""
        if self.chosen.base == "sent":
            return "as_sent"
        done = ["edit"] * bool(self.chosen.edited) + ["erratum"] * bool(self.chosen.new_lines)
        return "+".join(done) or "continued"

    @property
    def reason(self) -> Reason | None:
        """Why the prompt is served as it was sent."""
        return self.why_sent if self.chosen.base == "sent" else None

    @property
    def why_sent(self) -> Reason:
        """What kept every other prompt from being served. Follows from the request and from turns
        that are proven to be the caller's, never from what else is remembered or cached."""
        if not self.client.windows:
            return Reason.NO_FIELD
        if self.is_plain:
            return Reason.STRATEGY
        if self.found.reason is not None:
            return self.found.reason
        has_turns = any(variant.base == "conversation" for variant in self.others)
        return Reason.NO_SAVING if has_turns else Reason.STRATEGY

    @property
    def hint(self) -> str | None:
        """What the client could do about the reason."""
        reason = self.reason
        is_lapsed = reason is Reason.NO_BASE and self.claim.is_expired
        is_wanted = reason is Reason.NOT_PROVEN or is_lapsed
        return self.claim.hint if is_wanted else None

    def added_to(self, report: PromptReport) -> PromptReport:
        """``report`` with what was done about the prompt's fields."""
        fields = self.client.fields
        return msgspec.structs.replace(
            report,
            client_prompt_tokens=len(self.client.ids),
            base=self.chosen.base,
            as_sent_because=self.reason,
            as_sent_hint=self.hint,
            errata=[
                LineReport(
                    field=fields[line.number].name,
                    start=line.start,
                    stop=line.stop,
                    text=fields[line.number].line(line.value),
                )
                for line in self.chosen.new_lines
            ],
            edited=[fields[number].name for number in self.chosen.edited],
            unedited=[UneditedReport(field=u.field, reason=u.reason) for u in self.client.refused],
        )


@dataclass(slots=True)
class RequestState:
    """Plan, served spelling and token split of one request (or the rid of a compile).

    pieces     the spelling in force: chosen at admission, cut where a splice was not possible
    realised   half-open prompt intervals that were spliced for this request
    lost       (source, refusal) of spans that the last match could not compose; it counts only
               once the request is admitted, for a waiting request is matched again and again
    handed     the choice of the prompt that is being tried, for the match that follows alone
    evicted    numbers of skills that a refusal found evicted: the HTTP process recompiles them
    edit       which prompt is served; None where no field concerns the request
    unmet      why ``edits: require`` could not be met when the request was last tried
    no_edits   why the fields of the namespace were not looked for; None: they were, or none is
    """

    namespace: str
    options: Options
    plan: Plan
    split: TokenSplit
    is_compile: bool = False
    is_counted: bool = True
    pieces: Pieces = ()
    realised: list[tuple[int, int]] = field(default_factory=list)
    lost: tuple[Lost, ...] = ()
    handed: Handed | None = None
    evicted: set[int] = field(default_factory=set)
    edit: EditState | None = None
    no_edits: Reason | None = None
    unmet: str = ""

    def replan(self, plan: Plan) -> None:
        """Another prompt is served; nothing of it is covered yet."""
        refused = self.split.refused
        self.plan, self.pieces, self.lost, self.handed = plan, (), (), None
        self.split = TokenSplit(plan.num_tokens)
        self.split.refuse(refused)

    def take_handed(self, key: RadixKey) -> Choice | None:
        """What was handed on for ``key``. Only once: behind its match the tree may change."""
        handed, self.handed = self.handed, None
        return handed.choice if handed is not None and handed.is_for(key, self.plan) else None

    def is_valid_for(self, req: Request) -> bool:
        """A plan holds for exactly the prompt it was made for. The host may have replaced it
        (a refused request becomes [0]) or cut it (auto-truncation)."""
        return len(req.origin_input_ids) == self.plan.num_tokens

    def give_up(self, position: int, refusals: tuple[Refusal, ...] = ()) -> None:
        """Serve everything behind ``position`` plainly."""
        self.handed = None
        self.pieces = cut(self.pieces, position)
        self.split.refuse(refusals)

    def drop(self, position: int, reason: Reason) -> None:
        """Forget the plan; tokens before ``position`` keep their spelling, for their KV is what
        it is and must not answer a look-up for real tokens."""
        lost = {span.skill for spans in self.plan.alternatives for span in spans}
        self.plan = Plan(
            num_tokens=self.plan.num_tokens, registry_version=self.plan.registry_version
        )
        self.lost = ()
        self.give_up(position, tuple(Refusal(skill=s, reason=reason) for s in sorted(lost)))

    def report(self) -> dict[str, object]:
        """What leaves the scheduler: a PromptReport in plain JSON types, and ``evicted``, which is
        for the HTTP process."""
        report: dict[str, object] = msgspec.to_builtins(self._report())
        return report | {"evicted": sorted(self.evicted)}

    def _report(self) -> PromptReport:
        report = self.split.to_report()
        if self.edit is not None:
            return self.edit.added_to(report)
        return report if self.no_edits is None else self._as_sent(report)

    def _as_sent(self, report: PromptReport) -> PromptReport:
        return msgspec.structs.replace(
            report,
            client_prompt_tokens=self.split.num_tokens,
            base="sent",
            as_sent_because=self.no_edits,
            errata=[],
            edited=[],
            unedited=[],
        )


def report_of(req: Request) -> dict[str, object] | None:
    """What has become of a request so far; None for requests that kvedit does not touch."""
    state = state_of(req)
    if state is not None:
        return None if state.is_compile else state.report()
    refused: dict[str, object] | None = getattr(req, "kvedit_refused", None)  # set by a refusal
    return refused


def hang_on(req: Request, state: RequestState | None) -> None:
    """Our attribute on the host's object: it lives as long as the request does."""
    req.kvedit = state  # type: ignore[attr-defined]


def note_refused(req: Request, report: dict[str, object]) -> None:
    """The report of a request that is refused, and so has no state."""
    req.kvedit_refused = report  # type: ignore[attr-defined]


def state_of(req: Request | None) -> RequestState | None:
    """The request's state; None for requests that kvedit does not touch."""
    state: RequestState | None = getattr(req, "kvedit", None)  # set by intake, on some requests
    return state


def key_of(req: Request, ids: array[int]) -> RadixKey:
    """The tree key of ``ids`` (real ones) in the request's namespace."""
    return RadixKey(ids, req.extra_key, cache_salt=req.cache_salt)


def planned(req: Request | None) -> RequestState | None:
    """The state of a request that has, or had, something to compose, and a valid plan."""
    state = state_of(req)
    if req is None or state is None or not state.is_valid_for(req):
        return None
    return state if state.plan.alternatives or state.pieces else None


class ServedIds:
    """While entered, the request's ids are spelled as they are served (virtual where composed).

    Tree keys are built from the request's ids in the host's cache code; nothing outside it ever
    sees a virtual id. The real arrays come back on exit, also after an error.
    """

    def __init__(self, req: Request, pieces: Pieces) -> None:
        self._req = req
        self._pieces = pieces

    def __enter__(self) -> None:
        req = self._req
        self._real: tuple[array[int], array[int]] = (
            req.origin_input_ids,
            req.full_untruncated_fill_ids,
        )
        req.origin_input_ids = served_ids(req.origin_input_ids, self._pieces)
        req.full_untruncated_fill_ids = served_ids(req.full_untruncated_fill_ids, self._pieces)

    def __exit__(self, *exc: object) -> None:
        self._req.origin_input_ids, self._req.full_untruncated_fill_ids = self._real
