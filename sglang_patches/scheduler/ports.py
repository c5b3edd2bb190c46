"""What the rooms of the scheduler ask of the tree, and the tree of whoever listens to it.

Protocols of the attributes that are used, so that a room can be tried with a tree of a few lines.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.radix_cache import RadixKey

from kvedit.splice.spans import Plan
from kvedit.splice.spelling import Choice
from sglang_patches.host.protocols import Request
from sglang_patches.scheduler.request_state import RequestState

# The spelling of a key (real ids) that leaves the fewest tokens to compute, by the tree's KV.
Choose = Callable[[RadixKey, Plan], Choice]


class Paths(Protocol):
    """A tree of cached paths, and locks on their nodes."""

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """What is cached of a key. Nodes become recent and may be cut; no slot changes hands."""

    def path_device_indices(self, node: Any) -> torch.Tensor:
        """int64 slots of the whole path that ends in ``node``."""

    def lock(self, node: Any) -> Any:
        """What keeps the path up to ``node`` from being evicted, until it is unlocked."""

    def unlock(self, lock: Any) -> None: ...


class GrowingPaths(Paths, Protocol):
    """And what a splice needs to put slots into it."""

    token_to_kv_pool_allocator: Any

    def insert(self, params: InsertParams) -> InsertResult: ...


class Listener(Protocol):
    """Who is told what has happened to the tree."""

    def on_finished(self, req: Request, state: RequestState, up_to: int) -> None:
        """A request has ended; ``up_to`` tokens of its path are in the tree."""

    def on_emptied(self) -> None:
        """The host has reset the tree: locks, donors and queued copies are gone."""
