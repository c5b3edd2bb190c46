"""One compile: an ordinary one-token request that the scheduler was told to expect."""

from __future__ import annotations

import uuid
from typing import Any

from kvedit.errors import KvEditError, Unavailable, from_status
from kvedit.wire.commands import ReportCompileFailure
from sglang_patches.host.protocols import TokenizerManager
from sglang_patches.http.services import rpc

# Request ids of compiles on their way. Intake lets exactly these requests pass unchecked, so a
# client that spells such an id gains nothing: the object it sends is another one.
_own_requests: set[int] = set()


def new_rid() -> str:
    """A request id that no client can guess."""
    return "kvedit-compile-" + uuid.uuid4().hex


def is_own(request: Any) -> bool:
    """Whether this very request object was made by :func:`run`."""
    return id(request) in _own_requests


async def run(manager: TokenizerManager, rid: str, prefix: list[int], ids: list[int]) -> None:
    """Prefill ``prefix + ids`` under the announced ``rid``.

    The scheduler stores the result when the request finishes. Raises KvEditError when it fails,
    after telling the scheduler, which would wait for ever otherwise. No ``Request`` is passed on:
    a client that leaves must not abort a compile that others wait for.
    """
    from sglang.srt.managers.io_struct import GenerateReqInput

    request = GenerateReqInput(
        input_ids=prefix + ids,
        rid=rid,
        sampling_params={"max_new_tokens": 1, "temperature": 0},
        log_metrics=False,
    )
    _own_requests.add(id(request))
    try:
        await _prefill(manager, request)
    except Exception as error:
        await rpc.call(manager, ReportCompileFailure(rid=rid, reason=str(error)))
        raise
    finally:
        _own_requests.discard(id(request))


async def _prefill(manager: TokenizerManager, request: Any) -> None:
    from fastapi import HTTPException

    try:
        async for output in manager.generate_request(request, None):
            finish = output["meta_info"]["finish_reason"]
            if finish["type"] == "abort":
                message = finish.get("message") or "the request was aborted"
                raise Unavailable(f"kvedit: compile: expected a finished prefill, got: {message}")
    except KvEditError:
        raise
    except HTTPException as error:
        raise from_status(error.status_code, f"kvedit: compile: {error.detail}") from error
    except ValueError as error:
        raise from_status(400, f"kvedit: compile: {error}") from error
