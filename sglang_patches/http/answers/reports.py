"""Where the report of a request leaves the host, and how a refusal reaches its client."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from kvedit.errors import BadRequest
from kvedit.namespace import namespace_tag
from sglang_patches.guard import boundary
from sglang_patches.host.protocols import TokenizerManager
from sglang_patches.http.request.wishes import KEY
from sglang_patches.http.services.skill_service import service_of

EVICTED = "evicted"  # segment numbers in a report that are ours to recompile, not the client's


class Refused(BadRequest):
    """The scheduler refused a request of ours. A ValueError: every route of the host catches it.

    ``status_code`` is what /generate answers with, ``evicted`` the segments that would help.
    """

    def __init__(self, message: str, status_code: int, evicted: tuple[int, ...]) -> None:
        super().__init__(message)
        self.status_code = status_code
        self.evicted = evicted


def keep_report(
    original: Callable[..., None],
    manager: TokenizerManager,
    meta_info: dict[str, Any],
    state: Any,
    customized_info: dict[str, Any],
    index: int,
    finish_reason: dict[str, Any] | None,
) -> None:
    """AROUND ``TokenizerManager.update_request_meta_info``: ring, recompiles, and no empty list.

    The host does not see our key: it would repeat it, empty too, in every event of a stream. Runs
    in the loop that serves every request: an error here must not end it.
    """
    others = {key: values for key, values in customized_info.items() if key != KEY}
    original(manager, meta_info, state, others, index, finish_reason)
    with boundary("report", lambda: meta_info.pop(KEY, None)):
        reports = customized_info.get(KEY)
        if reports and reports[index]:  # of another request of the batch, or of this one
            meta_info[KEY] = list(reports[index])
            _keep(manager, meta_info[KEY][0], state, finish_reason)


def _keep(
    manager: TokenizerManager,
    report: dict[str, Any],
    state: Any,
    finish_reason: dict[str, Any] | None,
) -> None:
    if is_refusal(finish_reason or {}):
        return  # its report is not shown: raise_refusal reads it
    service = service_of(manager)
    evicted = report.pop(EVICTED, ())
    if evicted:
        service.recompiler.start(evicted)
    service.reports.put(state.obj.rid, _namespace(state.obj), report)


def _namespace(request: Any) -> str:
    """As the request sent it; the host has turned empty strings into None by now."""
    return namespace_tag(request.cache_salt, request.extra_key, None)


def is_refusal(finish_reason: dict[str, Any]) -> bool:
    """Whether a request ended because we refused it."""
    return str(finish_reason.get("err_type")).startswith("KvEdit")


async def raise_refusal(
    original: Callable[..., Awaitable[Any]],
    manager: TokenizerManager,
    out: Any,
    state: Any,
    is_stream: bool,
) -> Any:
    """AROUND ``TokenizerManager._handle_abort_finish_reason``: our refusals raise, streaming too.

    Without it a refused streaming request answers 200 with a token that means nothing.
    """
    finish = out["meta_info"]["finish_reason"]
    if not is_refusal(finish):
        return await original(manager, out, state, is_stream)
    from fastapi import HTTPException

    reports = out["meta_info"].get(KEY) or [{}]
    evicted = tuple(reports[0].get(EVICTED, ()))
    try:
        await original(manager, out, state, False)  # the host cleans up and raises
    except (ValueError, HTTPException) as error:
        raise Refused(finish["message"], int(finish["status_code"]), evicted) from error
    return None
