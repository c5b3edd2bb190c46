"""Reading a request's fields, at intake: what could be served instead of the prompt as sent."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator

from kvedit.edit.bases import Tools
from kvedit.edit.client_prompt import ClientPrompt, read_prompt
from kvedit.edit.ledger import Found
from kvedit.edit.proofs import Claim, claim_of
from kvedit.edit.served_path import ServedPath
from kvedit.edit.variants import Variant, as_sent, on_conversation, on_values
from kvedit.edit.window import window_ids
from kvedit.reason import Reason
from kvedit.request.options import Options
from kvedit.request.strategy import Strategy
from kvedit.splice.sources import PathSource
from kvedit.splice.spans import Plan, cut, served_ids
from sglang_patches.host.protocols import Request
from sglang_patches.scheduler.edit.room import EditRoom
from sglang_patches.scheduler.request_state import EditState, key_of


def read_edits(
    room: EditRoom,
    req: Request,
    namespace: str,
    options: Options,
    plan: Plan,
    plan_of: Callable[[array[int]], Plan],
) -> EditState | None:
    """What may be served instead of the request's prompt; None if no field concerns it."""
    if options.edits == "off" or not room.fields.visible(namespace):
        return None
    edit = edit_state(room, req, namespace, options, plan)
    if edit.client.windows:
        tools = _tools(room, req, edit.client, options, plan_of)
        strategies = map(tools.strategy_of, edit.client.fields)
        edit.is_plain = all(strategy == "recompute" for strategy in strategies)
        edit.others = () if edit.is_plain else tuple(_variants(room, edit, tools))
    return edit


def edit_state(
    room: EditRoom, req: Request, namespace: str, options: Options, plan: Plan
) -> EditState:
    """The state of a prompt that is served as sent, until there is something better."""
    fields = room.fields.visible(namespace)
    client = read_prompt(req.origin_input_ids, fields, room.chat_form, room.tokens)
    claim = claim_of(
        options,
        namespace,
        has_salt=bool(req.cache_salt),
        trust=room.config.trust,
        book=room.conversations,
        epoch=room.weight_epoch,
    )
    return EditState(
        client=client,
        claim=claim,
        weight_epoch=room.weight_epoch,
        found=_find(room, client, claim) if client.windows else Found(reason=Reason.NO_FIELD),
        sent=as_sent(client, plan),
    )


def _variants(room: EditRoom, edit: EditState, tools: Tools) -> Iterator[Variant]:
    client, (namespace, _) = edit.client, edit.claim.scope
    yield from on_conversation(client, edit.found, tools)
    declared = [(f.number, (f.base,)) for f in client.fields.values() if f.base is not None]
    yield from on_values(client, "declared", declared, tools)
    seen = [
        (number, room.seen_values.of(namespace, number))
        for number, field in client.fields.items()
        if field.cross_request
    ]
    yield from on_values(client, "cross_request", [pair for pair in seen if pair[1]], tools)


def _tools(
    room: EditRoom,
    req: Request,
    client: ClientPrompt,
    options: Options,
    plan_of: Callable[[array[int]], Plan],
) -> Tools:

    def cached(ids: array[int], plan: Plan) -> tuple[ServedPath, int]:
        choice = room.choose(key_of(req, ids), plan)
        return ServedPath(ids=ids, pieces=cut(choice.pieces, choice.matched)), choice.matched

    def donor_of(path: ServedPath) -> PathSource:
        ids = served_ids(path.ids, path.pieces)
        return PathSource(room.paths.number_of((req.extra_key, req.cache_salt), ids))

    def line_ids(number: int, value: str) -> array[int]:
        line = client.fields[number].line(value)
        return room.tokens.encode(f"{line}\n" if client.own_line else f"\n{line}")

    return Tools(
        plan_of=plan_of,
        cached=cached,
        donor_of=donor_of,
        line_ids=line_ids,
        window_ids=lambda number, value: window_ids(
            client.located[number], client.ids, value, room.tokens
        ),
        strategy_of=lambda number: strategy_in_force(client.fields[number].strategy, options),
        may_compose=options.splice != "off",
        page_size=room.page_size,
        min_span_tokens=room.config.min_span_tokens,
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


def _find(room: EditRoom, client: ClientPrompt, claim: Claim) -> Found:
    return room.ledger.find(
        claim,
        client.masked,
        client.masked.to_masked(client.anchor),
        public=client.is_public,
        text_of=lambda ids: room.tokens.joined(ids)[0],
        marks=room.tokens.special_ids,
    )
