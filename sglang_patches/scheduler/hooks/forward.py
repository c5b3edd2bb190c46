"""Before each forward: run the queued copies, on the stream the forward runs on.

A request that stands on slots whose copy failed ends with an error, and nothing of it is kept:
its output is dropped, its tokens do not enter the tree, its turn not the ledger. What it has left
to prefill is still computed, as the host does not stop between two chunks.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from sglang_patches.guard import boundary
from sglang_patches.host.protocols import Batch, Request
from sglang_patches.scheduler.hooks.intake import REFUSED
from sglang_patches.scheduler.request_state import state_of
from sglang_patches.scheduler.splice.copies import PendingCopies
from sglang_patches.scheduler.wiring.rooms import rooms_of


def forward_hook(worker: Any, batch: Batch | None = None, *args: Any, **kwargs: Any) -> None:
    """BEFORE ``TpModelWorker.forward_batch_generation``: nobody is ever served from slots that
    were not written."""
    if batch is None:
        return
    rooms = rooms_of(batch.tree_cache)
    if rooms is None:
        return
    rooms.copies.run()
    failed = rooms.copies.take_unwritten()
    if failed:
        _end_holders(batch, failed)


def _end_holders(batch: Batch, failed: list[PendingCopies]) -> None:
    """End the requests that stand on a target: of this batch, or one that was spliced for and
    waits for its next chunk. When that cannot be told, every one that has something composed."""
    waiting = [h for f in failed for h in f.holders if h not in batch.reqs and h.kv.holds_kv]
    candidates = [*batch.reqs, *waiting]
    doomed = [req for req in candidates if (state := state_of(req)) is not None and state.pieces]
    with boundary("end_holders", lambda: _end(doomed)) as hook:
        slots = torch.cat([target for f in failed for target in f.targets])
        table = batch.req_to_token_pool.req_to_token
        holding = [req for req in candidates if _stands_on(req, table, slots)]
    if hook.is_well:
        _end(holding)


def _stands_on(req: Request, table: torch.Tensor, slots: torch.Tensor) -> bool:
    """Whether the request's row of ``table`` (slots by request and position) names any of them."""
    row = table[req.kv.req_pool_idx, : req.kv.kv_allocated_len]
    return bool(torch.isin(row.to(torch.int64), slots).any())


def _end(reqs: list[Any]) -> None:
    """The host's own way for a request whose KV never landed."""
    for req in reqs:
        req.skip_radix_cache_insert = True
        req.to_finish = req.discard_output_reason = FINISH_ABORT(
            "kvedit: splice: expected its copy to run, got an internal error",
            HTTPStatus.INTERNAL_SERVER_ERROR,
            REFUSED,
        )
