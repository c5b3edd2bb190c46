"""Editing: which prompt a request is served with.

Intake reads the fields and builds the prompts that could be served instead of the one that was
sent; the prompt is decided each time the request is tried for admission, by the tokens that the
tree saves, and stays once it is admitted. When the request ends, the turn enters the ledger.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.radix_cache import RadixKey

from kvedit.edit.bases import Tools
from kvedit.edit.client_prompt import ClientPrompt, read_prompt
from kvedit.edit.ledger import Entry, Found
from kvedit.edit.locate import window_ids
from kvedit.edit.proofs import Claim, claim_of
from kvedit.edit.served_path import ServedPath
from kvedit.edit.variants import Variant, as_sent, on_conversation, on_values
from kvedit.request.options import Options
from kvedit.request.strategy import Strategy
from kvedit.splice.spans import Plan, cut, served_ids
from kvedit.splice.spelling import Choice
from sglang_patches.scheduler.request_state import EditState, RequestState

MIN_ROOM = 5  # what the host wants to be left behind any prompt
# reasons of a field that stands in a prompt, but not with another value
UNREAD_VALUE = frozenset(
    ("value_empty", "value_too_long", "value_markup", "value_open", "tokens_merge", "overlapping")
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang_patches.scheduler.runtime import Runtime
    from sglang_patches.scheduler.splice.tree import KvEditCache


def read_edits(
    cache: KvEditCache,
    req: Any,
    namespace: str,
    options: Options,
    plan: Plan,
    plan_of: Callable[[array[int]], Plan],
) -> EditState | None:
    """What may be served instead of the request's prompt; None if no field concerns it."""
    runtime = cache.runtime
    if options.edits == "off" or not runtime.fields.visible(namespace):
        return None
    edit = _edit_state(runtime, req, namespace, options, plan)
    if edit.client.windows:
        tools = _tools(cache, req, edit.client, options, plan_of)
        strategies = map(tools.strategy_of, edit.client.fields)
        edit.is_plain = all(strategy == "recompute" for strategy in strategies)
        edit.others = () if edit.is_plain else tuple(_variants(runtime, edit, tools))
    return edit


def _edit_state(
    runtime: Runtime, req: Any, namespace: str, options: Options, plan: Plan
) -> EditState:
    """The state of a prompt that is served as sent, until there is something better."""
    fields = runtime.fields.visible(namespace)
    client = read_prompt(req.origin_input_ids, fields, runtime.chat_form, runtime.tokens)
    claim = claim_of(
        options,
        namespace,
        has_salt=bool(req.cache_salt),
        trust=runtime.config.trust,
        book=runtime.conversations,
        epoch=runtime.weight_epoch,
    )
    return EditState(
        client=client,
        claim=claim,
        weight_epoch=runtime.weight_epoch,
        found=_find(runtime, client, claim) if client.windows else Found(reason="no_field"),
        sent=as_sent(client, plan),
    )


def _variants(runtime: Runtime, edit: EditState, tools: Tools) -> Iterator[Variant]:
    client, (namespace, _) = edit.client, edit.claim.scope
    yield from on_conversation(client, edit.found, tools)
    declared = [(f.number, (f.base,)) for f in client.fields.values() if f.base is not None]
    yield from on_values(client, "declared", declared, tools)
    seen = [
        (number, runtime.seen_values.of(namespace, number))
        for number, field in client.fields.items()
        if field.cross_request
    ]
    yield from on_values(client, "cross_request", [pair for pair in seen if pair[1]], tools)


def _tools(
    cache: KvEditCache,
    req: Any,
    client: ClientPrompt,
    options: Options,
    plan_of: Callable[[array[int]], Plan],
) -> Tools:
    runtime = cache.runtime

    def cached(ids: array[int], plan: Plan) -> tuple[ServedPath, int]:
        choice = cache.choose(_key(req, ids), plan)
        return ServedPath(ids=ids, pieces=cut(choice.pieces, choice.matched)), choice.matched

    def line_ids(number: int, value: str) -> array[int]:
        line = client.fields[number].line(value)
        return runtime.tokens.encode(f"{line}\n" if client.own_line else f"\n{line}")

    return Tools(
        plan_of=plan_of,
        cached=cached,
        donor_of=lambda path: runtime.paths.number_of(
            (req.extra_key, req.cache_salt), served_ids(path.ids, path.pieces)
        ),
        line_ids=line_ids,
        window_ids=lambda number, value: window_ids(
            client.located[number], client.ids, value, runtime.tokens
        ),
        strategy_of=lambda number: strategy_in_force(client.fields[number].strategy, options),
        may_compose=options.splice != "off",
        page_size=runtime.page_size,
        min_span_tokens=runtime.config.min_span_tokens,
        repair=options.repair or 0,
        topk=options.topk or 0,
    )


def strategy_in_force(declared: Strategy, options: Options) -> Strategy:
    """The request's strategy, else the field's. Until a gate has measured the model, ``auto`` is
    edit+erratum. A request that wants nothing spliced gets nothing composed."""
    strategy = options.strategy or declared
    if strategy == "auto":
        strategy = "edit+erratum"
    if options.splice == "off":
        without: dict[Strategy, Strategy] = {"edit": "recompute", "edit+erratum": "erratum"}
        return without.get(strategy, strategy)
    return strategy


def choose_prompt(cache: KvEditCache, req: Any, state: RequestState, edit: EditState) -> None:
    """Serve the prompt that costs the fewest tokens; a tie goes to the one sent, and so does what
    would give up exact KV for less than a minimum span."""
    if edit.max_new_tokens is None:
        edit.max_new_tokens = req.sampling_params.max_new_tokens
    offered = [edit.sent, *(v for v in edit.others if _fits(cache.runtime, edit, v))]
    looks = [(variant, _choice(cache, req, variant)) for variant in offered]  # each costs matches
    exact = looks[0][1].exact
    if state.options.edits == "require":
        reaching = [(v, choice) for v, choice in looks if _reaches(edit, v, choice)]
        state.unmet = "" if reaching else f"edits: {edit.why_sent}"
        looks = reaching or looks
    chosen, _ = min(looks, key=lambda look: look[1].cost(look[0].plan.worth, exact))
    if chosen is not edit.chosen:
        serve(cache.runtime, req, state, edit, chosen)


def _fits(runtime: Runtime, edit: EditState, variant: Variant) -> bool:
    """Whether the variant leaves the client the output tokens it was promised. What the host has
    cut to the room behind the prompt is cut to the room behind the variant."""
    assert edit.max_new_tokens is not None
    room = _room(runtime, variant)
    was_cut = edit.max_new_tokens == _room(runtime, edit.sent)
    return room >= MIN_ROOM and (was_cut or edit.max_new_tokens <= room)


def _room(runtime: Runtime, variant: Variant) -> int:
    """Output tokens that fit behind a prompt (the host's own rule)."""
    return runtime.max_request_tokens - len(variant.path.ids) - 1


def serve(
    runtime: Runtime, req: Any, state: RequestState, edit: EditState, variant: Variant
) -> None:
    """Make ``variant`` the request's prompt. Only before it is admitted."""
    before, ids = len(req.origin_input_ids), variant.path.ids
    if req.logprob_start_len == before:  # "output tokens only"
        req.logprob_start_len = len(ids)
    req.origin_input_ids = req.origin_input_ids_unpadded = ids
    req.full_untruncated_fill_ids = array("q")  # the host builds it anew
    if edit.max_new_tokens is not None:
        req.sampling_params.max_new_tokens = min(edit.max_new_tokens, _room(runtime, variant))
    state.replan(variant.plan)
    edit.chosen = variant


def _choice(cache: KvEditCache, req: Any, variant: Variant) -> Choice:
    return cache.choose(_key(req, variant.path.ids), variant.plan)


def _key(req: Any, ids: array[int]) -> RadixKey:
    return RadixKey(ids, req.extra_key, cache_salt=req.cache_salt)


def unmet(cache: KvEditCache, req: Any, edit: EditState) -> list[str]:
    """Why ``edits: require`` cannot be met: reuse must reach beyond every field in the prompt."""
    reasons = [f"{item.field}: {item.reason}" for item in edit.client.refused]
    if not edit.client.windows:
        return reasons or ["no_field"]
    if not any(_reaches(edit, v, _choice(cache, req, v)) for v in (edit.sent, *edit.others)):
        hint = f" ({edit.hint})" if edit.hint else ""
        reasons.append(f"{edit.why_sent}{hint}")
    return reasons


def _reaches(edit: EditState, variant: Variant, choice: Choice) -> bool:
    """Whether reuse reaches beyond every field of the prompt."""
    fields_end = max((window.stop for window in edit.client.windows), default=0)
    reused = len(variant.path.ids) - choice.computed
    return reused > fields_end or choice.matched > fields_end


def record_turn(cache: KvEditCache, req: Any, state: RequestState, up_to: int) -> None:
    """The request ended with ``up_to`` tokens of its path in the tree."""
    runtime = cache.runtime
    if not state.is_valid_for(req):
        return
    edit = _without_edits(runtime, req, state) if state.edit is None else state.edit
    if edit is None or not edit.is_frozen:
        return
    variant, client, found = edit.chosen, edit.client, edit.found
    reply = array("q", req.output_ids)
    served = variant.path.ids + reply
    while reply and reply[-1] in runtime.tokens.special_ids:
        reply.pop()  # a client does not send the end mark back, and alone it proves nothing
    _note_unread(runtime, state.namespace, client, reply)
    if not client.windows or not (edit.claim.can_return or client.is_public):
        return
    is_base = (
        state.edit is not None
        and edit.weight_epoch == runtime.weight_epoch
        and up_to >= variant.lines_end
    )
    entry = Entry(
        masked=client.masked.ids[: client.masked.to_masked(client.anchor)],
        path=ServedPath(
            ids=served[:up_to] if is_base else served,
            pieces=state.pieces,
            windows=variant.path.windows,
            lines=variant.path.lines,
            notes=variant.path.notes,
        ).with_live_notes(),
        anchor=variant.anchor,
        lines_end=variant.lines_end,
        reply_start=len(variant.path.ids),
        lineage=found.lineage if found.lineage is not None else runtime.ledger.new_lineage(),
        depth=found.depth,
        reply=reply,
    )
    if not is_base:
        runtime.ledger.note_rival(edit.claim.scope[0], entry)
        return
    runtime.ledger.record(edit.claim.scope, entry)
    for window in client.windows:
        if client.fields[window.number].cross_request:
            runtime.seen_values.add(edit.claim.scope[0], window.number, window.value)


def _note_unread(runtime: Runtime, namespace: str, client: ClientPrompt, reply: array[int]) -> None:
    unread = {item.field for item in client.unedited if item.reason in UNREAD_VALUE}
    for field in runtime.fields.visible(namespace) if unread else ():
        if field.name in unread:
            runtime.ledger.note_unread(namespace, field.number, reply)


def _without_edits(runtime: Runtime, req: Any, state: RequestState) -> EditState | None:
    """A request that was served without edits, as if it had been served as sent: its conversation
    may be told from a remembered one by nothing but its reply."""
    if not runtime.fields.visible(state.namespace):
        return None
    edit = _edit_state(runtime, req, state.namespace, state.options, state.plan)
    edit.is_frozen = True
    return edit


def _find(runtime: Runtime, client: ClientPrompt, claim: Claim) -> Found:
    return runtime.ledger.find(
        claim,
        client.masked,
        client.masked.to_masked(client.anchor),
        public=client.is_public,
        text_of=lambda ids: runtime.tokens.joined(ids)[0],
    )
