"""A radix tree that is a list of cached paths, over a tokenizer of words."""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvedit.edit.masked import common_prefix
from tests.unit.marks import Marks

START, END = "<|im_start|>", "<|im_end|>"
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


@dataclass
class Cached:
    """One path. ids: as the tree spells it. real, seen: the token behind each slot, and the marks
    of all that its KV was computed from."""

    key: Any
    ids: array[int]
    real: array[int]
    seen: list[Marks]

    def cut(self, stop: int) -> None:
        self.ids, self.real, self.seen = self.ids[:stop], self.real[:stop], self.seen[:stop]


class FakeTree:
    """Any whole-page prefix of a path is a hit."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.paths: list[Cached] = []

    def match(self, key: Any, spelled: array[int], real: array[int]) -> int:
        best = 0
        for path in self.paths:
            hit = self._whole_pages(common_prefix(path.ids, spelled)) if path.key == key else 0
            assert path.real[:hit] == real[:hit], "a hit that holds the KV of other tokens"
            best = max(best, hit)
        return best

    def insert(self, path: Cached) -> None:
        path.cut(self._whole_pages(len(path.ids)))
        self.paths.append(path)

    def evict(self, index: int, keep: int) -> None:
        self.paths[index].cut(self._whole_pages(keep))

    def holding(self, key: Any, spelled: array[int]) -> Cached | None:
        """A path of which ``spelled`` is cached as a whole."""
        stop = len(spelled)
        paths = (path for path in self.paths if path.key == key and path.ids[:stop] == spelled)
        return next(paths, None)

    def _whole_pages(self, num_tokens: int) -> int:
        return num_tokens // self.page_size * self.page_size
