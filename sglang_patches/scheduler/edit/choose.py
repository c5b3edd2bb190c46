"""Which prompt a request is served with: decided each time it is tried for admission, by the tokens
that the tree saves; once it is admitted, it stays."""

from __future__ import annotations

from array import array

from kvedit.edit.variants import Variant
from kvedit.reason import Reason
from kvedit.splice.spelling import Choice
from sglang_patches.host.protocols import Request
from sglang_patches.scheduler.edit.room import EditRoom
from sglang_patches.scheduler.handed import Handed
from sglang_patches.scheduler.request_state import EditState, RequestState, key_of

MIN_OUTPUT_TOKENS = 5  # what the host wants to be left behind any prompt


def choose_prompt(room: EditRoom, req: Request, state: RequestState, edit: EditState) -> None:
    """Serve the prompt that costs the fewest tokens; a tie goes to the one sent, and so does what
    would give up exact KV for less than a minimum span. The match that follows is handed the choice
    that was made for it."""
    if edit.max_new_tokens is None:
        edit.max_new_tokens = req.sampling_params.max_new_tokens
    offered = [edit.sent, *(v for v in edit.others if _fits(room, edit, v))]
    looks = [(variant, _choice(room, req, variant)) for variant in offered]  # each costs matches
    exact = looks[0][1].exact
    if state.options.edits == "require":
        reaching = [(v, choice) for v, choice in looks if _reaches(edit, v, choice)]
        state.unmet = "" if reaching else f"edits: {edit.why_sent}"
        looks = reaching or looks
    chosen, choice = min(looks, key=lambda look: look[1].cost(look[0].plan.worth, exact))
    if chosen is not edit.chosen:
        serve(room, req, state, edit, chosen)
    state.handed = Handed(key_of(req, chosen.path.ids), chosen.plan, choice)


def _fits(room: EditRoom, edit: EditState, variant: Variant) -> bool:
    """Whether the variant leaves the client the output tokens it was promised. What the host has
    cut to the room behind the prompt is cut to the room behind the variant."""
    assert edit.max_new_tokens is not None
    left = _left_for_output(room, variant)
    was_cut = edit.max_new_tokens == _left_for_output(room, edit.sent)
    return left >= MIN_OUTPUT_TOKENS and (was_cut or edit.max_new_tokens <= left)


def _left_for_output(room: EditRoom, variant: Variant) -> int:
    """Output tokens that fit behind a prompt (the host's own rule)."""
    return room.max_request_tokens - len(variant.path.ids) - 1


def serve(
    room: EditRoom, req: Request, state: RequestState, edit: EditState, variant: Variant
) -> None:
    """Make ``variant`` the request's prompt. Only before it is admitted."""
    before, ids = len(req.origin_input_ids), variant.path.ids
    if req.logprob_start_len == before:  # "output tokens only"
        req.logprob_start_len = len(ids)
    req.origin_input_ids = req.origin_input_ids_unpadded = ids
    req.full_untruncated_fill_ids = array("q")  # the host builds it anew
    if edit.max_new_tokens is not None:
        req.sampling_params.max_new_tokens = min(
            edit.max_new_tokens, _left_for_output(room, variant)
        )
    state.replan(variant.plan)
    edit.chosen = variant


def _choice(room: EditRoom, req: Request, variant: Variant) -> Choice:
    return room.choose(key_of(req, variant.path.ids), variant.plan)


def unmet(room: EditRoom, req: Request, edit: EditState) -> list[str]:
    """Why ``edits: require`` cannot be met: reuse must reach beyond every field in the prompt."""
    reasons = [f"{item.field}: {item.reason}" for item in edit.client.refused]
    if not edit.client.windows:
        return reasons or [str(Reason.NO_FIELD)]
    if not any(_reaches(edit, v, _choice(room, req, v)) for v in (edit.sent, *edit.others)):
        hint = f" ({edit.hint})" if edit.hint else ""
        reasons.append(f"{edit.why_sent}{hint}")
    return reasons


def _reaches(edit: EditState, variant: Variant, choice: Choice) -> bool:
    """Whether reuse reaches beyond every field of the prompt."""
    fields_end = max((window.stop for window in edit.client.windows), default=0)
    reused = len(variant.path.ids) - choice.computed
    return reused > fields_end or choice.matched > fields_end
