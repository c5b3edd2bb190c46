"""Before each forward: run the queued copies, on the stream the forward runs on."""

from __future__ import annotations

import logging
import traceback
from http import HTTPStatus
from typing import Any

from sglang.srt.managers.schedule_batch import FINISH_ABORT

from sglang_patches.cache import KvEditCache
from sglang_patches.guard import errors, trip
from sglang_patches.intake import REFUSED
from sglang_patches.state import state_of

logger = logging.getLogger("kvedit")


def forward_hook(worker: Any, batch: Any = None, *args: Any, **kwargs: Any) -> None:
    """BEFORE ``TpModelWorker.forward_batch_generation``.

    If the copies cannot be run at all, the requests of this batch that stand on composed tokens
    are aborted with an error, and every path composed from those segments becomes unreachable:
    nobody is ever served from slots that were not written.
    """
    if batch is None or not isinstance(batch.tree_cache, KvEditCache):
        return
    runtime = batch.tree_cache.runtime
    if not len(runtime.copies):
        return
    segments = runtime.copies.segments()
    try:
        trip("forward")
        runtime.copies.launch()
    except Exception:
        errors["forward"] += 1
        logger.error("kvedit: copies failed:\n%s", traceback.format_exc())
        runtime.copies.release_pending()
        for segment in segments:
            runtime.distrust(segment)
        _abort_composed(batch)


def _abort_composed(batch: Any) -> None:
    for req in batch.reqs:
        state = state_of(req)
        if state is not None and state.pieces:
            req.to_finish = FINISH_ABORT(
                "kvedit: splice: expected its copy to run, got an internal error",
                HTTPStatus.INTERNAL_SERVER_ERROR,
                REFUSED,
            )
