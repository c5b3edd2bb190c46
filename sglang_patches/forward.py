"""Before each forward: run the queued copies, on the stream the forward runs on."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from sglang_patches.cache import KvEditCache
from sglang_patches.intake import REFUSED


def forward_hook(worker: Any, batch: Any = None, *args: Any, **kwargs: Any) -> None:
    """BEFORE ``TpModelWorker.forward_batch_generation``.

    Requests of this batch that stand on slots whose copy failed are aborted with an error:
    nobody is ever served from slots that were not written.
    """
    if batch is None or not isinstance(batch.tree_cache, KvEditCache):
        return
    runtime = batch.tree_cache.runtime
    runtime.run_copies()
    if runtime.unwritten:
        unwritten, runtime.unwritten = torch.cat(runtime.unwritten), []
        _abort_holders(batch, unwritten)


def _abort_holders(batch: Any, slots: torch.Tensor) -> None:
    """Abort the requests of ``batch`` whose rows name any of ``slots`` (int64 [N])."""
    for req in batch.reqs:
        row = batch.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        held = row[: req.kv.kv_allocated_len].to(torch.int64)
        if torch.isin(held, slots).any():
            req.to_finish = FINISH_ABORT(
                "kvedit: splice: expected its copy to run, got an internal error",
                HTTPStatus.INTERNAL_SERVER_ERROR,
                REFUSED,
            )
