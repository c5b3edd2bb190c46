"""When a request ends, its turn enters the ledger."""

from __future__ import annotations

from array import array

from sglang.srt.managers.schedule_batch import (
    FINISH_MATCHED_STR,
    FINISH_MATCHED_TOKEN,
    FINISHED_MATCHED_REGEX,
)

from kvedit.edit.client_prompt import ClientPrompt
from kvedit.edit.ledger import Entry
from kvedit.edit.served_path import ServedPath
from kvedit.reason import Reason
from sglang_patches.host.protocols import Request
from sglang_patches.scheduler.edit.read import edit_state
from sglang_patches.scheduler.edit.room import EditRoom
from sglang_patches.scheduler.request_state import EditState, RequestState

# reasons of a field that stands in a prompt, but not with another value
UNREAD_VALUE = frozenset(
    (
        Reason.VALUE_EMPTY,
        Reason.VALUE_TOO_LONG,
        Reason.VALUE_MARKUP,
        Reason.VALUE_OPEN,
        Reason.TOKENS_MERGE,
        Reason.OVERLAPPING,
    )
)
# ends at which the client is not shown the last of the reply
STOPPED = (FINISH_MATCHED_STR, FINISH_MATCHED_TOKEN, FINISHED_MATCHED_REGEX)


def record_turn(room: EditRoom, req: Request, state: RequestState, up_to: int) -> None:
    """The request ended with ``up_to`` tokens of its path in the tree."""
    if not state.is_valid_for(req):
        return
    edit = _without_edits(room, req, state) if state.edit is None else state.edit
    if edit is None or not edit.is_frozen:
        return
    variant, client, found = edit.chosen, edit.client, edit.found
    reply = array("q", req.output_ids)
    served = variant.path.ids + reply
    while reply and reply[-1] in room.tokens.special_ids:
        reply.pop()  # a client does not send the end mark back, and alone it proves nothing
    _note_unread(room, state.namespace, client, reply)
    if not client.windows or not (edit.claim.can_return or client.is_public):
        return
    is_base = (
        state.edit is not None
        and edit.weight_epoch == room.weight_epoch
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
        lineage=found.lineage if found.lineage is not None else room.ledger.new_lineage(),
        depth=found.depth,
        reply=reply,
        is_trimmed=len(reply) == len(req.output_ids) and isinstance(req.finished_reason, STOPPED),
    )
    if not is_base:
        room.ledger.note_rival(edit.claim.scope[0], entry)
        return
    room.ledger.record(edit.claim.scope, entry)
    for window in client.windows:
        if client.fields[window.number].cross_request:
            room.seen_values.add(edit.claim.scope[0], window.number, window.value)


def _note_unread(room: EditRoom, namespace: str, client: ClientPrompt, reply: array[int]) -> None:
    unread = {item.field for item in client.unedited if item.reason in UNREAD_VALUE}
    for field in room.fields.visible(namespace) if unread else ():
        if field.name in unread:
            room.ledger.note_unread(namespace, field.number, reply)


def _without_edits(room: EditRoom, req: Request, state: RequestState) -> EditState | None:
    """A request that was served without edits, as if it had been served as sent: its conversation
    may be told from a remembered one by nothing but its reply."""
    if not room.fields.visible(state.namespace):
        return None
    edit = edit_state(room, req, state.namespace, state.options, state.plan)
    edit.is_frozen = True
    return edit
