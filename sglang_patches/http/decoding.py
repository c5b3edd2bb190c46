"""What a generate request carries must be readable at the other end.

Under msgpack IPC the host checks types only when the scheduler reads a message, where a value that
does not fit ends the server.
"""

from __future__ import annotations

from typing import Any

from kvedit.errors import BadRequest
from sglang_patches.host.protocols import TokenizerManager
from sglang_patches.http.services.skill_service import is_enabled

_FREE = ("sampling_params", "session_params")  # what HTTP leaves untyped


def check_wire(result: Any, manager: TokenizerManager, *args: Any, **kwargs: Any) -> Any:
    """AFTER ``TokenizerManager._create_tokenized_object``. Raises BadRequest."""
    from sglang.srt.managers import io_struct

    if is_enabled(manager) and not io_struct._USE_PICKLE_IPC:
        for name in _FREE:
            check_part(name, getattr(result, name, None))  # embeddings have no session
    return result


def check_part(name: str, value: Any) -> None:
    """``value``: one of the host's message types, or None."""
    import msgspec

    if not isinstance(value, msgspec.Struct):
        return
    try:
        msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=type(value))
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise BadRequest(f"{name}: expected values of the host's types, got: {error}") from None
