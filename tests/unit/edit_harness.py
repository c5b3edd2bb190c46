"""A server without a model: the editing engine over a tree that is a list of cached paths.

The glue is the scheduler's own (``read_edits``, ``choose_prompt``, ``record_turn``); the tree
holds, next to each spelled path, the real tokens whose KV stands there, so that a copy of the
wrong token is seen at once, and what that KV has seen: the marks of the texts in front of it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from sglang.srt.mem_cache.radix_cache import RadixKey

from kvedit.config import Config, Trust
from kvedit.edit.donor_paths import PathBook
from kvedit.edit.ledger import Ledger
from kvedit.edit.proofs import TokenBook
from kvedit.fields.book import FieldBook
from kvedit.fields.declaration_parser import parse_declaration
from kvedit.namespace import SHARED, namespace_tag
from kvedit.request.options import Options
from kvedit.skills.declaration import SkillDeclaration
from kvedit.skills.registry import Registry
from kvedit.splice.planner import PlanLimits, plan_spans
from kvedit.splice.sources import PathSource
from kvedit.splice.spans import Plan, Span, served_ids
from kvedit.splice.spelling import Choice, choose_path
from kvedit.splice.token_classes import TokenSplit
from kvedit.splice.virtual_ids import count_virtual, is_virtual
from kvedit.text.chat_probe import derive_chat_form
from sglang_patches.scheduler.edit.choose import choose_prompt
from sglang_patches.scheduler.edit.read import read_edits
from sglang_patches.scheduler.edit.record import record_turn
from sglang_patches.scheduler.edit.room import EditRoom
from sglang_patches.scheduler.request_state import EditState, RequestState
from tests.unit.fake_tree import END, START, Cached, FakeTree, WordTokens
from tests.unit.marks import Marks, MarksIn, said_at

SALT = "one user's"
SUFFIX = f"{END}\n{START}assistant\n"


def rendered(messages: Sequence[tuple[str, str]], generate: bool = True) -> str:
    text = "".join(f"{START}{role}\n{content}{END}\n" for role, content in messages)
    return text + f"{START}assistant\n" * generate


@dataclass
class Outcome:
    """What one request was served. ``as_sent``: what the prompt as sent would have computed.
    ``seen``: by token, the marks that its KV was computed under."""

    ids: array[int]
    state: RequestState
    computed: int
    as_sent: int
    text: str
    seen: list[Marks]

    @property
    def edit(self) -> EditState:
        assert self.state.edit is not None
        return self.state.edit


class FakeServer:
    """The editing room over a tree that is a list."""

    def __init__(
        self,
        fields: Sequence[dict[str, Any]],
        *,
        page_size: int = 1,
        min_span: int = 4,
        trust: Trust = "tokens",
        marks_in: MarksIn = lambda text: (),
    ):
        self.marks_in = marks_in
        self.tokens = WordTokens()
        self.tree = FakeTree(page_size)
        self.registry = Registry("host", retired_max=8)
        self.limits = {"page_size": page_size, "min_span_tokens": min_span, "default_seam": 4}
        book = FieldBook()
        for field in fields:
            book.declare(parse_declaration(field), SHARED, self.tokens.special_texts)
        self.room = EditRoom(
            choose=self.choose,
            tokenizer=None,
            config=Config(min_span_tokens=min_span, trust=trust),
            page_size=page_size,
            max_request_tokens=100_000,
            fields=book,
            chat_form=derive_chat_form(self._render, self.tokens),
        )
        self.room.tokens = self.tokens  # words, where the room would read a real tokenizer

    def _render(self, messages: list[dict[str, str]], generate: bool) -> list[int]:
        pairs = [(m["role"], m["content"]) for m in messages]
        return list(self.tokens.encode(rendered(pairs, generate)))

    def add_skill(self, text: str) -> None:
        ids = self.tokens.encode(text)
        declaration = SkillDeclaration(
            name="skill",
            namespace=SHARED,
            token_ids=ids,
            compile_prefix=array("q"),
            replace=True,
        )
        skill = self.registry.declare(declaration, "rid").skill
        self.registry.compiled("rid")
        self.tree.insert(Cached(skill.number, ids, ids, [frozenset()] * len(ids)))

    def flush(self) -> None:
        self.tree.paths = [p for p in self.tree.paths if isinstance(p.key, int)]
        self.room.weight_epoch += 1
        self.room.forget_turns()

    def restart(self) -> None:
        self.flush()
        self.room.weight_epoch = 0
        self.room.ledger = Ledger()
        self.room.conversations = TokenBook()
        self.room.paths = PathBook()
        self.room.seen_values.clear()

    # ---- what the glue asks

    def choose(self, key: RadixKey, plan: Plan) -> Choice:
        known = [
            [s for s in spans if not self._is_path(s) or self._path(s) is not None]
            for spans in plan.alternatives
        ]
        real, tree_key = array("q", key.token_ids), (key.extra_key, key.cache_salt)
        return choose_path(
            [spans for spans in known if spans],
            num_tokens=len(real),
            match=lambda pieces: self.tree.match(tree_key, served_ids(real, pieces), real),
            composable=lambda span: self.donor(span, span.start, span.stop) is not None,
        )

    def donor(self, span: Span, start: int, stop: int) -> tuple[array[int], list[Marks]] | None:
        """The real tokens that a copy of prompt positions [start, stop) takes, and what their KV
        has seen; None: evicted."""
        low, high = span.donor_interval(start, stop)
        assert 0 <= low < high
        if self._is_path(span):
            path = self._path(span)
            if path is None or len(path.ids) < high:
                return None
            key, ids = path.key, path.ids[:high]
        else:
            skill = self.registry.by_number(span.source.number)
            assert skill is not None
            key, ids = span.source.number, skill.segment.token_ids[:high]
        assert not count_virtual(ids[low:high]), "a copy of a copy"
        cached = self.tree.holding(key, ids)
        return None if cached is None else (cached.real[low:high], cached.seen[low:high])

    def _is_path(self, span: Span) -> bool:
        return isinstance(span.source, PathSource)

    def _path(self, span: Span) -> Any:
        return self.room.paths.by_number(span.source.number)

    # ---- one request

    def ask(
        self,
        prompt: str,
        reply: str,
        options: Options | None = None,
        *,
        salt: str | None = SALT,
        abort_at: int | None = None,
        give_up_at: int | None = None,
    ) -> Outcome:
        """Serve ``prompt``. ``abort_at``: the request ends when so many tokens were prefilled;
        ``give_up_at``: a donor goes between admission and the splice of that run (by index)."""
        options = options or Options()
        ids = self.tokens.encode(prompt)
        namespace = namespace_tag(salt, None, None)
        plan = self._plan(ids, options, namespace)
        req: Any = SimpleNamespace(
            origin_input_ids=ids,
            origin_input_ids_unpadded=ids,
            full_untruncated_fill_ids=array("q"),
            extra_key=None,
            cache_salt=salt,
            logprob_start_len=-1,
            sampling_params=SimpleNamespace(max_new_tokens=64),
            output_ids=[],
            finished_reason=None,
        )
        self.room.conversations.take_in(options, namespace, self.room.weight_epoch)
        state = RequestState(namespace, options, plan, TokenSplit(len(ids)))
        state.edit = read_edits(
            self.room,
            req,
            namespace,
            options,
            plan,
            lambda prompt: self._plan(prompt, options, namespace),
        )
        as_sent = self.choose(RadixKey(ids, cache_salt=salt), plan).computed
        if state.edit is not None:
            choose_prompt(self.room, req, state, state.edit)
            state.edit.is_frozen = True
        choice = self.choose(RadixKey(req.origin_input_ids, cache_salt=salt), state.plan)
        state.pieces = choice.pieces
        served = req.origin_input_ids
        if give_up_at is not None:
            ahead = [
                max(start, choice.matched)
                for start, stop in runs(state.pieces)
                if stop > choice.matched
            ]
            if ahead:
                state.give_up(ahead[give_up_at % len(ahead)])
        self._check_pieces(served, state, choice.matched)
        if abort_at is None:
            req.output_ids = list(self.tokens.encode(reply + END))
            up_to = len(served) + len(req.output_ids) - 1
        else:
            up_to = max(choice.matched, abort_at % (len(served) + 1))
        whole = (served + array("q", req.output_ids))[:up_to]
        spelled, key = served_ids(whole, state.pieces), (None, salt)
        seen = self._seen(key, spelled, whole, state, choice.matched)
        self.tree.insert(Cached(key, spelled, whole, seen))
        up_to = up_to // self.tree.page_size * self.tree.page_size
        record_turn(self.room, req, state, up_to)
        text = self.tokens.text(served)
        return Outcome(served, state, choice.computed, as_sent, text, seen)

    def _plan(self, ids: array[int], options: Options, namespace: str) -> Plan:
        limits = PlanLimits(**self.limits, last_position=len(ids) - 1)
        return plan_spans(
            ids, self.registry, namespace, options, limits, lambda a, b: self.tokens.text(ids[a:b])
        )

    def said_at(self, ids: array[int]) -> list[Marks]:
        return said_at(self.tokens, self.marks_in, ids)

    def _seen(
        self, key: Any, spelled: array[int], real: array[int], state: RequestState, matched: int
    ) -> list[Marks]:
        """A token sees what stands in front of it, and what that has seen. A copy takes along what
        it saw where it was computed."""
        matched = min(matched, len(real))
        cached = self.tree.holding(key, spelled[:matched])
        seen: list[Marks] = [] if cached is None else cached.seen[:matched]
        assert len(seen) == matched
        copied: dict[int, Marks] = {}
        for piece in state.pieces:
            first = max(piece.start, matched)
            if first < piece.stop:
                found = self.donor(piece.span, first, piece.stop)
                assert found is not None
                copied.update(zip(range(first, piece.stop), found[1], strict=True))
        said, before = self.said_at(real), frozenset[Any]().union(*seen)
        for position in range(matched, len(real)):
            seen.append(copied.get(position, before | said[position]))
            before |= seen[-1]
        return seen

    def _check_pieces(self, real: array[int], state: RequestState, matched: int) -> None:
        """Every copied token is a computed one of the same text, and the last one is forwarded."""
        page, position = self.tree.page_size, 0
        spelled = served_ids(real, state.pieces)
        assert not any(map(is_virtual, spelled[-1:]))
        for piece in state.pieces:
            assert position <= piece.start < piece.stop < len(real)
            position = piece.stop
            first = max(piece.start, matched)
            if first < piece.stop:
                copied = self.donor(piece.span, first, piece.stop)
                assert copied is not None
                assert copied[0] == real[first : piece.stop], "a copy of another token"
        for start, stop in runs(state.pieces):
            assert start % page == 0 and stop % page == 0, "a run of copies that is no whole pages"


def runs(pieces: Sequence[Any]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for piece in pieces:
        if found and found[-1][1] == piece.start:
            found[-1] = found[-1][0], piece.stop
        else:
            found.append((piece.start, piece.stop))
    return found
