"""The small host with fields: prompts are texts, and the KV that a request stood on is compared
with what its text says. The tokenizer is of words."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvedit.fields.declaration_parser import parse_declaration
from kvedit.namespace import SHARED
from kvedit.request.options import Options
from kvedit.text.chat_probe import derive_chat_form
from sglang_patches.scheduler.request_state import EditState, key_of, state_of
from tests.unit.edit_harness import SALT, rendered
from tests.unit.edit_lives import marks_in
from tests.unit.fake_tree import END, WordTokens
from tests.unit.marks import Marks, own_marks, said_at
from tests.unit.small_host import Served, SmallHost


class Words:
    """What ``EditRoom.decode`` calls of a tokenizer."""

    def __init__(self, tokens: WordTokens) -> None:
        self._tokens = tokens

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return self._tokens.text(ids)


@dataclass
class Answer:
    """What a request with a text was served; ``as_sent``: what its prompt would have cost as it was
    sent, in tokens to compute and the price of boundaries."""

    served: Served
    ids: array[int]
    text: str
    as_sent: int

    @property
    def report(self) -> dict[str, Any]:
        return self.served.report

    @property
    def computed(self) -> int:
        computed: int = self.report["computed"]
        return computed

    @property
    def seen(self) -> list[Marks]:
        return self.served.seen

    @property
    def edit(self) -> EditState:
        state = state_of(self.served.req)
        assert state is not None and state.edit is not None
        return state.edit


class FieldHost(SmallHost):
    def __init__(self, fields: Sequence[dict[str, Any]], **sizes: Any) -> None:
        self.tokens = WordTokens()
        super().__init__(
            tokenizer=Words(self.tokens),
            marks_of=lambda ids: own_marks(self.tokens, marks_in, ids),
            **sizes,
        )
        edits = self.rooms.edits
        edits.tokens = self.tokens  # type: ignore[assignment]  # where it would read a real one
        edits.chat_form = derive_chat_form(self._render, self.tokens)
        for field in fields:
            edits.fields.declare(parse_declaration(field), SHARED, self.tokens.special_texts)

    def _render(self, messages: list[dict[str, str]], generate: bool) -> list[int]:
        pairs = [(m["role"], m["content"]) for m in messages]
        return self.tokens.encode(rendered(pairs, generate)).tolist()

    def said_at(self, ids: array[int]) -> list[Marks]:
        return said_at(self.tokens, marks_in, ids)

    def register_text(self, text: str, **fields: Any) -> Any:
        return self.register("skill", self.tokens.encode(text), **fields)

    # ---- requests

    def ask(
        self,
        prompt: str,
        reply: str,
        how: Options | None = None,
        *,
        salt: str | None = SALT,
        retract_at: int | None = None,
    ) -> Answer:
        """Serve ``prompt`` to its end. ``retract_at``: the request gives its KV up once, when it
        has so many output tokens (at least 1)."""
        req = self.send(prompt, how, salt=salt)
        assert req.to_finish is None, req.to_finish
        return self.answer(req, reply, retract_at=retract_at)

    def send(self, prompt: str, how: Options | None = None, *, salt: str | None = SALT) -> Any:
        ids = self.tokens.encode(prompt).tolist()
        options = None if how is None else how.to_json()
        return self.begin(ids, num_new=32, kvedit=options, salt=salt)

    def answer(self, req: Any, reply: str, *, retract_at: int | None = None) -> Answer:
        as_sent = self._as_sent(req)
        outputs = self.tokens.encode(reply + END).tolist()
        num_passes = self.prefill(req, outputs[0])
        for position, token in enumerate(outputs[1:], start=1):
            if req.to_finish is not None:
                break
            if position == retract_at:
                self.retract(req)
                num_passes += self.prefill(req, token)
            else:
                self.decode(req, token)
        ids = req.origin_input_ids
        served = self.finish(req, num_passes)
        return Answer(served, ids, self.tokens.text(ids), as_sent)

    def _as_sent(self, req: Any) -> int:
        state, ids, page_size = state_of(req), req.origin_input_ids, self.page_size
        if state is None:
            return len(ids)
        choice = self.tree.choose(key_of(req, ids), state.plan)
        last_page = len(ids) - (len(ids) - 1) // page_size * page_size  # it is always computed
        price = choice.num_boundaries * self.rooms.config.boundary_tokens
        return max(last_page, choice.computed) + price
