"""Intake: recognise skills and fields when the scheduler creates a request, and before each try to
admit it decide which prompt is tried."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from sglang.srt.beam_search.coordinator import BeamCoordinator
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.managers.utils import is_health_check_generate_req

from kvedit.errors import BadRequest
from kvedit.namespace import namespace_tag
from kvedit.reason import Reason
from kvedit.request.options import Options, from_wire
from kvedit.splice.sources import SkillSource
from kvedit.splice.spans import Plan, Refusal
from kvedit.splice.token_classes import TokenSplit
from sglang_patches.guard import boundary
from sglang_patches.host.protocols import ReceivedRequest, Request, Scheduler
from sglang_patches.scheduler.edit.choose import choose_prompt, serve, unmet
from sglang_patches.scheduler.edit.read import read_edits
from sglang_patches.scheduler.edit.room import EditRoom
from sglang_patches.scheduler.request_state import (
    EditState,
    RequestState,
    hang_on,
    note_refused,
    state_of,
)
from sglang_patches.scheduler.skills.desk import SkillDesk
from sglang_patches.scheduler.splice.tree import KvEditCache
from sglang_patches.scheduler.telemetry.metrics import Metrics
from sglang_patches.scheduler.wiring.rooms import Rooms, rooms_of

RECOVERABLE = (Reason.EVICTED, Reason.COMPILING)
REFUSED = "KvEditUnmet"  # err_type of our refusals; the HTTP side turns it into a real 400


def intake_hook(
    req: Request, scheduler: Scheduler, recv_req: ReceivedRequest, *args: Any, **kwargs: Any
) -> None:
    """AFTER ``Scheduler._create_generation_req``. The request comes back unchanged, but for
    ``req.kvedit`` (its state), or ``req.kvedit_refused`` (the report of a refused one)."""
    rooms = rooms_of(scheduler.tree_cache)
    if rooms is None or is_health_check_generate_req(recv_req):
        return
    if not _concerns(rooms, recv_req):
        return  # installed but unused: nothing of ours touches the request
    with boundary("intake", lambda: _forget(rooms, req, recv_req)) as hook:
        settle = _take_in(rooms, req, recv_req)
    if hook.is_well:
        settle()


def prompt_hook(req: Request, tree_cache: Any = None, *args: Any, **kwargs: Any) -> None:
    """BEFORE ``Req.init_next_round_input``: decide which prompt is tried for admission."""
    state, rooms = state_of(req), rooms_of(tree_cache)
    if state is None or rooms is None:
        return
    state.handed = None  # by an earlier try that no match followed: the tree has changed since
    if state.edit is None or state.edit.is_frozen:
        return
    edits, edit = rooms.edits, state.edit
    if not state.is_valid_for(req):
        state.edit = None  # refused or truncated by the host: nothing may be served instead
        return
    with boundary("choose_prompt", lambda: _serve_as_sent(edits, req, state, edit)):
        choose_prompt(edits, req, state, edit)


def _serve_as_sent(edits: EditRoom, req: Request, state: RequestState, edit: EditState) -> None:
    serve(edits, req, state, edit, edit.sent)
    state.edit = None
    if state.options.edits == "require":
        state.unmet = f"edits: {Reason.INTERNAL_ERROR}"


def _forget(rooms: Rooms, req: Request, recv_req: ReceivedRequest) -> None:
    """Serve the request as if kvedit were not there. A compile must not be: its text belongs to
    one namespace, and somebody waits for the outcome. Nor what requires reuse."""
    hang_on(req, None)
    reason = "internal error, see the server's log"
    if rooms.desk.compile_failed(req.rid, reason) is not None:
        req.set_finish_with_abort(reason, HTTPStatus.SERVICE_UNAVAILABLE)
    elif '"require"' in str(_requested(recv_req)):  # whatever could not be read in it
        _refuse_request(req, recv_req, f"kvedit: require: {reason}")


def _concerns(rooms: Rooms, recv_req: ReceivedRequest) -> bool:
    is_compile = rooms.desk.registry.by_rid(recv_req.rid) is not None
    return is_compile or _requested(recv_req) is not None or rooms.is_in_use


def _take_in(rooms: Rooms, req: Request, recv_req: ReceivedRequest) -> Callable[[], None]:
    """What to do with the request. Until that is called, the request is as it came."""
    skill = rooms.desk.registry.by_rid(recv_req.rid)
    if skill is not None:
        number = skill.number
        return lambda: _announce_compile(rooms.desk, req, number)
    try:
        options = from_wire(_requested(recv_req))
    except BadRequest as error:
        message = str(error)
        return lambda: _refuse_request(req, recv_req, message)
    if options.sealed.unasked and not rooms.is_in_use:
        return lambda: None
    state = _plan(rooms, req, recv_req, options)
    reasons = _unmet_reasons(rooms.tree, req, state) if options.splice == "require" else []
    if options.edits == "require":
        reasons += _unmet_edits(rooms.edits, req, state)
    return lambda: _adopt(req, recv_req, state, reasons)


def _adopt(
    req: Request, recv_req: ReceivedRequest, state: RequestState, reasons: list[str]
) -> None:
    """Give the request its state, or the 400 of a ``require`` that is not met."""
    hang_on(req, state)
    if reasons:
        note_refused(req, state.report())
        _refuse_request(req, recv_req, "kvedit: require: " + "; ".join(reasons))


def _requested(recv_req: ReceivedRequest) -> object:
    params = recv_req.sampling_params.custom_params
    return params.get("kvedit") if isinstance(params, dict) else None


def _announce_compile(desk: SkillDesk, req: Request, segment: int) -> None:
    """Our own compile request: its path goes into the segment's secret tree namespace."""
    req.extra_key = desk.tree_namespace(segment)
    req.cache_salt = None
    num_tokens = len(req.origin_input_ids)
    state = RequestState(
        namespace=req.extra_key,
        options=Options(splice="off"),
        plan=Plan(num_tokens=num_tokens, registry_version=desk.registry.version),
        split=TokenSplit(num_tokens),
        is_compile=True,
        is_counted=False,
    )
    hang_on(req, state)


def _plan(rooms: Rooms, req: Request, recv_req: ReceivedRequest, options: Options) -> RequestState:
    edits, ids = rooms.edits, req.origin_input_ids
    # The host reads an empty salt or key as none, so does the HTTP side when it registers.
    namespace = namespace_tag(
        recv_req.cache_salt or None, recv_req.extra_key or None, recv_req.lora_id
    )
    edits.conversations.take_in(options, namespace, edits.weight_epoch)

    def plan_of(prompt: array[int]) -> Plan:
        return rooms.plan(prompt, namespace, options)

    fields, registry = edits.fields.visible(namespace), rooms.desk.registry
    could_apply = bool(fields or registry.listed(namespace))
    blockers = [Reason.EXACT] * could_apply if options.exact else _blockers(req, recv_req)
    if options.exact or blockers:
        plan = Plan(
            num_tokens=len(ids),
            registry_version=registry.version,
            refused=tuple(Refusal(skill="", reason=reason) for reason in blockers),
        )
    else:
        plan = plan_of(ids)
    state = RequestState(
        namespace=namespace,
        options=options,
        plan=plan,
        split=TokenSplit(len(ids)),
        is_counted=not _is_warmer(rooms.reporter.metrics, recv_req, options),
        no_edits=_no_edits(options) if fields else None,
    )
    rooms.reporter.refuse(state, plan.refused)
    if not options.exact and not blockers:
        state.edit = read_edits(edits, req, namespace, options, plan, plan_of)
    return state


def _is_warmer(metrics: Metrics, recv_req: ReceivedRequest, options: Options) -> bool:
    """Whether this is the host's own request, which warms a prefix for n > 1 samples."""
    if options.sealed.samples is not None:
        return metrics.is_first(options.sealed.samples)
    return recv_req.sampling_params.max_new_tokens == 0 and not options.sealed.wants_nothing


def _no_edits(options: Options) -> Reason | None:
    if options.exact:
        return Reason.EXACT
    return Reason.OFF if options.edits == "off" else None


def _blockers(req: Request, recv_req: ReceivedRequest) -> list[Reason]:
    """Features that look at every prompt token, or key it by more than its id."""
    checks = {
        Reason.SESSION: recv_req.session_params is not None or recv_req.session_id is not None,
        Reason.INPUT_EMBEDS: recv_req.input_embeds is not None,
        Reason.POSITIONAL_EMBED_OVERRIDES: recv_req.positional_embed_overrides is not None,
        Reason.TOKEN_TYPE_IDS: recv_req.token_type_ids is not None,
        Reason.MULTIMODAL: recv_req.mm_inputs is not None,
        Reason.MULTI_ITEM: recv_req.multi_item_delimiter_indices is not None,
        Reason.TOKEN_INDICES_TO_POOL: recv_req.token_indices_to_pool is not None,
        Reason.ROUTED_EXPERTS: bool(recv_req.return_routed_experts),
        Reason.INDEXER_TOPK: bool(recv_req.return_indexer_topk),
        Reason.HIDDEN_STATES: bool(recv_req.return_hidden_states),
        Reason.ADAPTER: recv_req.lora_id is not None,
        Reason.NO_CACHE_INSERT: bool(req.skip_radix_cache_insert),
        Reason.BEAM: BeamCoordinator.request_beam_width(recv_req) > 1,
    }
    return [reason for reason, blocked in checks.items() if blocked]


def _unmet_reasons(tree: KvEditCache, req: Request, state: RequestState) -> list[str]:
    """Why ``require`` cannot be met as things stand: every token of the named skills behind
    the seam must be exact, composed or derived. Notes the skills that a compile would help."""
    lost = tree.preview(req, state)
    state.evicted |= {
        source.number
        for source, refusal in lost
        if refusal.reason in RECOVERABLE and isinstance(source, SkillSource)
    }
    return [_spelled(refusal) for refusal in (*state.plan.refused, *(r for _, r in lost))]


def _unmet_edits(edits: EditRoom, req: Request, state: RequestState) -> list[str]:
    if state.edit is not None:
        return unmet(edits, req, state.edit)
    return ["edits: no field is declared, or the request asks for what they do not support"]


def _spelled(refusal: Refusal) -> str:
    detail = "".join(f" {key}={value}" for key, value in refusal.detail)
    return f"{refusal.skill or 'request'}: {refusal.reason}{detail}"


def refuse_late(req: Request, state: RequestState) -> None:
    """``require`` turned out unmet at admission: the request ends with the 400 after the
    forward it was admitted to, before anything is streamed. Not one that has output: it was
    retracted and its skill is gone since, so it goes on plainly and its report says so."""
    if req.output_ids:
        return
    is_required = state.options.splice == "require"
    refused = [_spelled(refusal) for refusal in state.split.refused] if is_required else []
    reasons = "; ".join([*refused, *filter(None, [state.unmet])])
    req.to_finish = FINISH_ABORT(f"kvedit: require: {reasons}", HTTPStatus.BAD_REQUEST, REFUSED)


def _refuse_request(req: Request, recv_req: ReceivedRequest, message: str) -> None:
    """A 400 before anything is streamed. The host overwrites the message when the logprob
    window of the shortened prompt is off, hence the reset."""
    hang_on(req, None)
    req.set_finish_with_abort(message, HTTPStatus.BAD_REQUEST, REFUSED)
    recv_req.logprob_start_len = -1
    recv_req.return_logprob = False
