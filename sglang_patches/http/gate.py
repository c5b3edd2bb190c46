"""What a generate request must satisfy before it goes to the scheduler."""

from __future__ import annotations

from array import array
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from kvedit.checks import check_ids
from kvedit.errors import BadRequest
from sglang_patches.host.protocols import GenerateRequest, TokenizerManager
from sglang_patches.http.answers.by_request import Answer, answer_of, answered
from sglang_patches.http.answers.reports import Refused
from sglang_patches.http.request import conversation
from sglang_patches.http.request.conversation import handed_out
from sglang_patches.http.request.strings import check_strings
from sglang_patches.http.request.wishes import settled
from sglang_patches.http.services import compile_request
from sglang_patches.http.services.skill_service import is_enabled, service_of

_ID_LISTS = (list, tuple, array)


def generate_request(
    original: Callable[..., AsyncGenerator[Any, None]],
    manager: TokenizerManager,
    obj: GenerateRequest,
    request: Any = None,
) -> AsyncGenerator[Any, None]:
    """AROUND ``TokenizerManager.generate_request`` (an async generator, so is the answer)."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    if not is_enabled(manager) or compile_request.is_own(obj):
        return original(manager, obj, request)
    answer = answer_of(request)
    outputs = _checked(original, manager, obj, request, answer)
    if not isinstance(obj, GenerateReqInput):
        return outputs
    return answered(outputs, manager, obj, answer)


async def _checked(
    original: Callable[..., AsyncGenerator[Any, None]],
    manager: TokenizerManager,
    obj: GenerateRequest,
    request: Any,
    answer: Answer,
) -> AsyncGenerator[Any, None]:
    from sglang.srt.managers.io_struct import GenerateReqInput

    service = service_of(manager)
    check_prompt(obj.input_ids, manager.model_config.vocab_size)
    check_overrides(obj.positional_embed_overrides)
    check_strings(obj, is_used=service.is_used)
    if isinstance(obj, GenerateReqInput):
        is_exact = service.config.exact or answer.is_echo
        obj.sampling_params = settled(obj, is_exact=is_exact)
        if obj.rid is None:
            obj.rid = answer.rid
        token = conversation.seal(obj, has_reports=service.config.reports)
    else:
        token = None
    # Closed with ours, not by the collector: the host's clean-up hangs on it.
    try:
        async with aclosing(handed_out(original(manager, obj, request), token)) as outputs:
            async for output in outputs:
                yield output
        return
    except Refused as refusal:
        if not await _recompiled(manager, obj, refusal):
            raise
    # A refusal comes before the first output, so nothing is sent twice.
    async with aclosing(handed_out(original(manager, obj, request), token)) as outputs:
        async for output in outputs:
            yield output


async def _recompiled(manager: TokenizerManager, obj: GenerateRequest, refusal: Refused) -> bool:
    """Whether the skills that a ``require`` lacked are back and it may try again.

    The recompiles go on when the wait is over. A batch does not wait: its other prompts run.
    """
    service = service_of(manager)
    if not obj.is_single:
        service.recompiler.start(refusal.evicted)
        return False
    wait_s = service.config.compile_wait_s
    return await service.recompiler.ready(refusal.evicted, timeout_s=wait_s)


def check_prompt(input_ids: Any, vocab_size: int) -> None:
    """Refuse ids outside the vocabulary: the host hands them to the embedding, which dies.

    ``input_ids``: None, one prompt or a list of prompts. Raises BadRequest.
    """
    if not isinstance(input_ids, _ID_LISTS) or not input_ids:
        return  # text, or what the host itself refuses
    if isinstance(input_ids[0], _ID_LISTS):
        for i, ids in enumerate(input_ids):
            _check_ids(ids, vocab_size, f"input_ids[{i}]")
    else:
        _check_ids(input_ids, vocab_size, "input_ids")


def check_overrides(value: Any) -> None:
    """Refuse embedding overrides that are plain JSON: the host's scheduler ends on them.

    ``value``: None, one PositionalEmbeds or a list of them (Python callers). Raises BadRequest.
    """
    from sglang.srt.managers.embed_types import PositionalEmbeds

    for item in value if isinstance(value, list) else [value]:
        if item is not None and not isinstance(item, PositionalEmbeds):
            raise BadRequest(
                f"positional_embed_overrides: expected none over HTTP, got {type(item).__name__}"
            )


def _check_ids(ids: Any, vocab_size: int, field: str) -> None:
    if ids and set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab_size:
        return  # three loops in C: about 3 ms for a prompt of 32k ids
    check_ids(ids, vocab_size, len(ids), field=field)
