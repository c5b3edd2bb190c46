"""A server without a model: the editing engine over a tree that is a list of cached paths.

The glue is the scheduler's own (``read_edits``, ``choose_prompt``, ``record_turn``); the tree
holds, next to each spelled path, the real tokens whose KV stands there, so that a copy of the
wrong token is seen at once.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from sglang.srt.mem_cache.radix_cache import RadixKey

from kvedit.chatform import derive_chat_form
from kvedit.donorpaths import FIRST_PATH_NUMBER, PathBook
from kvedit.fields import FieldBook, parse_declaration
from kvedit.ids import count_virtual, is_virtual
from kvedit.ledger import Ledger
from kvedit.masks import common_prefix
from kvedit.namespace import SHARED
from kvedit.options import Options
from kvedit.paths import Choice, choose_path
from kvedit.planner import PlanLimits, plan_spans
from kvedit.report import TokenSplit
from kvedit.seenvalues import SeenValues
from kvedit.skills import Registry
from kvedit.spans import Plan, Span, served_ids
from sglang_patches.editing import choose_prompt, read_edits, record_turn
from sglang_patches.state import EditState, RequestState

NAMESPACE = "ns:mine"
START, END = "<|im_start|>", "<|im_end|>"
SUFFIX = f"{END}\n{START}assistant\n"
SPLIT = re.compile(r"<\|im_start\|>|<\|im_end\|>| ?\w+|\s|<| ?[^\w\s<]+")


class WordTokens:
    """A tokenizer of words that take the space in front of them along."""

    def __init__(self) -> None:
        self._texts: list[str] = [START, END]
        self._ids = {text: i for i, text in enumerate(self._texts)}
        self.special_ids = frozenset((0, 1))
        self.special_texts = frozenset((START, END))
        self.bos_id = None

    def encode(self, text: str) -> array[int]:
        return array("q", [self._id(piece) for piece in SPLIT.findall(text)])

    def _id(self, piece: str) -> int:
        if piece not in self._ids:
            self._ids[piece] = len(self._texts)
            self._texts.append(piece)
        return self._ids[piece]

    def token_bytes(self, token_id: int) -> bytes:
        return self._texts[token_id].encode()

    def joined(self, ids: Sequence[int]) -> tuple[bytes, Any]:
        pieces = [self.token_bytes(i) for i in ids]
        return b"".join(pieces), np.cumsum([len(p) for p in pieces], dtype=np.int64)

    def text(self, ids: Sequence[int]) -> str:
        return self.joined(ids)[0].decode()


def rendered(messages: Sequence[tuple[str, str]], generate: bool = True) -> str:
    text = "".join(f"{START}{role}\n{content}{END}\n" for role, content in messages)
    return text + f"{START}assistant\n" * generate


class FakeTree:
    """Paths as (tree key, spelled ids, real ids); any whole-page prefix of one is a hit."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.paths: list[tuple[Any, array[int], array[int]]] = []

    def match(self, key: Any, spelled: array[int], real: array[int]) -> int:
        best = 0
        for other, ids, tokens in self.paths:
            hit = self._whole_pages(common_prefix(ids, spelled)) if other == key else 0
            assert tokens[:hit] == real[:hit], "a hit that holds the KV of other tokens"
            best = max(best, hit)
        return best

    def insert(self, key: Any, spelled: array[int], real: array[int]) -> None:
        stop = self._whole_pages(len(spelled))
        self.paths.append((key, spelled[:stop], real[:stop]))

    def evict(self, index: int, keep: int) -> None:
        key, spelled, real = self.paths[index]
        stop = self._whole_pages(keep)
        self.paths[index] = key, spelled[:stop], real[:stop]

    def tokens_of(self, key: Any, spelled: array[int]) -> array[int]:
        """The real tokens of a path that is cached as a whole."""
        return next(
            real for k, ids, real in self.paths if k == key and ids[: len(spelled)] == spelled
        )

    def _whole_pages(self, num_tokens: int) -> int:
        return num_tokens // self.page_size * self.page_size


@dataclass
class Outcome:
    """What one request was served. ``as_sent``: what the prompt as sent would have computed."""

    ids: array[int]
    state: RequestState
    computed: int
    as_sent: int
    text: str

    @property
    def edit(self) -> EditState:
        assert self.state.edit is not None
        return self.state.edit


class FakeServer:
    """Also the cache that the glue sees: it asks for ``runtime`` and ``choose``."""

    def __init__(self, fields: Sequence[dict[str, Any]], *, page_size: int = 1, min_span: int = 4):
        self.tokens = WordTokens()
        self.tree = FakeTree(page_size)
        self.registry = Registry("host", retired_max=8)
        self.limits = {"page_size": page_size, "min_span_tokens": min_span, "default_seam": 4}
        book = FieldBook()
        for field in fields:
            book.declare(parse_declaration(field), NAMESPACE, self.tokens.special_texts)
        self.runtime: Any = SimpleNamespace(
            fields=book,
            chat_form=derive_chat_form(self._render, self.tokens),
            tokens=self.tokens,
            ledger=Ledger(),
            paths=PathBook(),
            seen_values=SeenValues(),
            weight_epoch=0,
            page_size=page_size,
            max_request_tokens=100_000,
            config=SimpleNamespace(min_span_tokens=min_span),
            is_path=lambda segment: segment >= FIRST_PATH_NUMBER,
        )

    def _render(self, messages: list[dict[str, str]], generate: bool) -> list[int]:
        pairs = [(m["role"], m["content"]) for m in messages]
        return list(self.tokens.encode(rendered(pairs, generate)))

    def add_skill(self, text: str) -> None:
        ids = self.tokens.encode(text)
        skill = self.registry.declare(
            name="skill",
            namespace=SHARED,
            token_ids=ids,
            compile_prefix=array("q"),
            seam=None,
            pin=False,
            replace=True,
            rid="rid",
        ).skill
        self.registry.compiled("rid")
        self.tree.insert(skill.number, ids, ids)

    def flush(self) -> None:
        self.tree.paths = [p for p in self.tree.paths if isinstance(p[0], int)]
        self.runtime.ledger.clear()
        self.runtime.paths.clear()

    def restart(self) -> None:
        self.flush()
        self.runtime.ledger = Ledger()
        self.runtime.paths = PathBook()
        self.runtime.seen_values.clear()

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
            composable=lambda span: self.donor_tokens(span, span.start, span.stop) is not None,
        )

    def donor_tokens(self, span: Span, start: int, stop: int) -> array[int] | None:
        """The real tokens that a copy of prompt positions [start, stop) takes; None: evicted."""
        low, high = span.donor_interval(start, stop)
        assert 0 <= low < high
        if self._is_path(span):
            path = self._path(span)
            if path is None or len(path.ids) < high:
                return None
            key, ids = path.key, path.ids[:high]
        else:
            skill = self.registry.by_number(span.segment)
            assert skill is not None
            key, ids = span.segment, skill.segment.token_ids[:high]
        assert not count_virtual(ids[low:high]), "a copy of a copy"
        for other, spelled, real in self.tree.paths:
            if other == key and spelled[:high] == ids:
                return real[low:high]
        return None

    def _is_path(self, span: Span) -> bool:
        return bool(self.runtime.is_path(span.segment))

    def _path(self, span: Span) -> Any:
        return self.runtime.paths.by_number(span.segment)

    # ---- one request

    def ask(
        self,
        prompt: str,
        reply: str,
        options: Options | None = None,
        *,
        abort_at: int | None = None,
        give_up_at: int | None = None,
    ) -> Outcome:
        """Serve ``prompt``. ``abort_at``: the request ends when so many tokens were prefilled;
        ``give_up_at``: a donor goes between admission and the splice of that run (by index)."""
        options = options or Options()
        ids = self.tokens.encode(prompt)
        plan = self._plan(ids, options)
        req: Any = SimpleNamespace(
            origin_input_ids=ids,
            origin_input_ids_unpadded=ids,
            full_untruncated_fill_ids=array("q"),
            extra_key=None,
            cache_salt=None,
            logprob_start_len=-1,
            sampling_params=SimpleNamespace(max_new_tokens=64),
            output_ids=[],
        )
        state = RequestState(NAMESPACE, options, plan, TokenSplit(len(ids)))
        cache: Any = self
        state.edit = read_edits(
            cache, req, NAMESPACE, options, plan, lambda prompt: self._plan(prompt, options)
        )
        as_sent = self.choose(RadixKey(ids), plan).computed
        if state.edit is not None:
            choose_prompt(cache, req, state, state.edit)
            state.edit.is_frozen = True
        choice = self.choose(RadixKey(req.origin_input_ids), state.plan)
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
        self.tree.insert((None, None), served_ids(whole, state.pieces), whole)
        up_to = up_to // self.tree.page_size * self.tree.page_size
        record_turn(cache, req, state, up_to)
        return Outcome(served, state, choice.computed, as_sent, self.tokens.text(served))

    def _plan(self, ids: array[int], options: Options) -> Plan:
        limits = PlanLimits(**self.limits, last_position=len(ids) - 1)
        return plan_spans(
            ids, self.registry, NAMESPACE, options, limits, lambda a, b: self.tokens.text(ids[a:b])
        )

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
                copied = self.donor_tokens(piece.span, first, piece.stop)
                assert copied == real[first : piece.stop], "a copy of another token"
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
