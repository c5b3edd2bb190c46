"""A model that writes down what it does: the K of a token is the token's key at its position, its V
names the token, the tokens that it was computed behind, and what was said by then.

A copy takes V along, so that V tells where KV was computed, not where it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from kvedit_kernels import PoolGroup
from sglang_patches.pools import GroupWithRope
from tests.unit.marks import Marks

HEADS, HEAD_DIM, LAYERS = 1, 8, 2
TOKEN, HISTORY, SEEN = 0, 1, 2  # elements of V; the others are 0
KEY_ERROR = 1e-3  # of a rotation in fp32; a shift off by one is off by tenths

MarksOf = Callable[[Sequence[int]], Mapping[int, Marks]]  # of a prompt's ids: by position, if any


class SmallModel:
    """And its pool. ``marks_of``: what a prompt says, and where."""

    def __init__(self, num_slots: int, page_size: int, marks_of: MarksOf = lambda ids: {}) -> None:
        self.pool = MHATokenToKVPool(
            size=num_slots,
            page_size=page_size,
            dtype=torch.float32,
            head_num=HEADS,
            head_dim=HEAD_DIM,
            layer_num=LAYERS,
            device="cpu",
            enable_memory_saver=False,
        )
        self.inv_freq = torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=torch.float64)
        self._marks_of = marks_of
        self._histories: dict[tuple[int, int], int] = {}  # (of the token in front, token) -> number
        self._seen: list[Marks] = [frozenset()]  # by number

    def group(self) -> GroupWithRope:
        group = PoolGroup.from_views(
            [self.pool.get_key_buffer(i) for i in range(LAYERS)],
            [self.pool.get_value_buffer(i) for i in range(LAYERS)],
            dtype=torch.float32,
            page_size=0,
            rot_offset=0,
            rot_dim=HEAD_DIM,
            is_neox=True,
            rotate=True,
        )
        return GroupWithRope(group, self.inv_freq, "full", tuple(range(LAYERS)), "rope")

    # ---- what it writes

    def compute(self, text: Sequence[int], slots: torch.Tensor, start: int) -> None:
        """The forward of ``text[start:]``, as far as there are slots, behind what ``slots[:start]``
        hold. ``text``: all of the ids, for what a token ends may be seen by what follows."""
        ids = text[: len(slots)]
        behind = self.values(slots[:start])
        before = frozenset[Any]().union(*(self._seen[n] for n in set(behind[:, SEEN].tolist())))
        histories = self.histories(ids[start:], int(behind[-1, HISTORY]) if start else 0)
        own = self._marks_of(text)
        marks = (own.get(position, frozenset()) for position in range(start, len(ids)))
        seen = list(accumulate(marks, frozenset.union, initial=before))[1:]
        value = torch.zeros(len(ids) - start, HEAD_DIM)
        value[:, TOKEN] = torch.tensor(ids[start:])
        value[:, HISTORY] = torch.tensor(histories)
        value[:, SEEN] = torch.tensor([self._number(one) for one in seen])
        keys = self.keys(ids[start:], start)
        for layer in range(LAYERS):
            self.pool.get_key_buffer(layer)[slots[start:], 0] = keys
            self.pool.get_value_buffer(layer)[slots[start:], 0] = value

    def keys(self, ids: Sequence[int], start: int = 0) -> torch.Tensor:
        """fp32 [N, HEAD_DIM]: the keys of tokens at positions ``start`` and on (neox halves)."""
        tokens = torch.tensor(ids, dtype=torch.float64)[:, None]
        first = torch.arange(1, 5, dtype=torch.float64) + tokens % 13
        second = torch.arange(5, 9, dtype=torch.float64) - tokens % 7
        angle = self.inv_freq * torch.arange(start, start + len(ids))[:, None]
        turned = [
            first * angle.cos() - second * angle.sin(),
            second * angle.cos() + first * angle.sin(),
        ]
        return torch.cat(turned, dim=1).float()

    def histories(self, ids: Sequence[int], behind: int = 0) -> list[int]:
        """Numbers that name each token together with all in front of it; ``behind``: of what
        stands in front of the first."""
        numbers = []
        for token in ids:
            behind = self._histories.setdefault((behind, token), len(self._histories) + 1)
            numbers.append(behind)
        return numbers

    def _number(self, marks: Marks) -> int:
        if marks not in self._seen:
            self._seen.append(marks)
        return self._seen.index(marks)

    # ---- what is read

    def values(self, slots: torch.Tensor, layer: int = 0) -> torch.Tensor:
        """int64 [N, HEAD_DIM]"""
        return self.pool.get_value_buffer(layer)[slots, 0].long()

    def seen(self, slots: torch.Tensor) -> list[Marks]:
        """By slot, what was said when its KV was computed."""
        return [self._seen[number] for number in self.values(slots)[:, SEEN].tolist()]

    def misread(self, ids: Sequence[int], slots: torch.Tensor, num_exact: int) -> list[str]:
        """What is wrong with serving ``ids`` from ``slots``, of which the first ``num_exact`` were
        computed behind these very tokens."""
        problems, want, keys = [], torch.tensor(ids, dtype=torch.int64), self.keys(ids)
        for layer in range(LAYERS):
            got = self.values(slots, layer)
            error = (self.pool.get_key_buffer(layer)[slots, 0] - keys).abs().amax(dim=1)
            history = torch.tensor(self.histories(ids[:num_exact]), dtype=torch.int64)
            wrong = {
                "another token": got[:, TOKEN] != want,
                "another position": error > KEY_ERROR,
                "other tokens in front": got[:num_exact, HISTORY] != history,
            }
            problems += [
                f"layer {layer}: KV of {what} at {mask.nonzero().flatten().tolist()}"
                for what, mask in wrong.items()
                if mask.any()
            ]
        return problems
