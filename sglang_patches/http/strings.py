"""Strings of a generate request: checked once, where it enters, on every route."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvedit.errors import BadRequest
from kvedit.namespace import is_unicode

MAX_ID_CHARS = 512  # what a report's place and a namespace are named by
# Fields whose strings name something: they come back in logs, events, metrics and reports.
_IDS = (
    "rid",
    "session_id",
    "cache_salt",
    "extra_key",
    "lora_path",
    "lora_id",
    "routing_key",
    "conversation_id",
)
_OTHERS = ("session_params", "custom_labels", "sampling_params")
MAX_DEPTH = 64


def check_strings(obj: Any, *, is_used: bool) -> None:
    """Refuse strings that are no valid Unicode, and ids without a bound. Raises BadRequest.

    No JSON writer takes a lone surrogate, so it must not come as far as something that only one
    process has. ``is_used``: a server that has neither skills nor fields passes on what it passed
    on without kvedit.
    """
    if not is_used:
        return
    for name in _IDS:
        for path, text in _strings(getattr(obj, name, None), name):
            _check(path, text)
            if len(text) > MAX_ID_CHARS:
                raise BadRequest(
                    f"{path}: expected at most {MAX_ID_CHARS} characters, got {len(text)}"
                )
    for name in _OTHERS:
        for path, text in _strings(getattr(obj, name, None), name):
            _check(path, text)


def _check(path: str, text: str) -> None:
    if not is_unicode(text):
        raise BadRequest(f"{path}: expected valid Unicode, got a lone surrogate")


def _strings(value: Any, path: str, depth: int = 0) -> Iterator[tuple[str, str]]:
    """Every string in a JSON value with its place; of an object also the keys."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, (list, tuple, dict)):
        if depth == MAX_DEPTH:
            raise BadRequest(f"{path}: expected at most {MAX_DEPTH} levels, got more")
        if isinstance(value, dict):
            yield from ((f"a key of {path}", key) for key in value if isinstance(key, str))
            value = value.items()
        else:
            value = enumerate(value)
        for key, item in value:
            yield from _strings(item, f"{path}[{key!r:.40}]", depth + 1)
