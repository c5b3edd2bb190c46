"""Strings of a generate request: checked once, where it enters, on every route."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

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
MAX_CONTAINERS = 32_768  # lists and objects in one field: about 0.1 s of the event loop
_CONTAINERS = (list, tuple, dict)


def check_strings(obj: Any, *, is_used: bool) -> None:
    """Refuse strings that are no valid Unicode, and ids without a bound. Raises BadRequest.

    No JSON writer takes a lone surrogate, so it must not come as far as something that only one
    process has. ``is_used``: a server that has neither skills nor fields passes on what it passed
    on without kvedit.
    """
    if not is_used:
        return
    for name in _IDS:
        _check(getattr(obj, name, None), name, MAX_ID_CHARS)
    for name in _OTHERS:
        _check(getattr(obj, name, None), name)


class _Node(NamedTuple):
    """A list or an object; where it stands is spelled only for a message."""

    items: Any
    parent: _Node | None
    key: Any


def _check(value: Any, name: str, max_chars: int | None = None) -> None:
    """Every string in a JSON value, of an object also the keys. Level by level, in loops that run
    in C but over lists and objects: a body costs less here than it cost to parse."""
    level, room = [_Node((value,), None, None)], MAX_CONTAINERS
    for _ in range(MAX_DEPTH + 1):
        deeper: list[_Node] = []
        for node in level:
            kinds = set(map(type, _values(node.items)))
            if isinstance(node.items, dict) or _has(kinds, str):
                _check_texts(node, name, max_chars)
            if _has(kinds, _CONTAINERS):
                deeper.extend(islice(_containers(node), room + 1 - len(deeper)))
            if len(deeper) > room:
                raise BadRequest(
                    f"{name}: expected at most {MAX_CONTAINERS} lists and objects, got more"
                )
        if not deeper:
            return
        level, room = deeper, room - len(deeper)
    raise BadRequest(f"{_path(level[0], name)}: expected at most {MAX_DEPTH} levels, got more")


def _containers(node: _Node) -> Iterator[_Node]:
    return (_Node(v, node, k) for k, v in _entries(node.items) if isinstance(v, _CONTAINERS))


def _check_texts(node: _Node, name: str, max_chars: int | None) -> None:
    texts = [value for value in _values(node.items) if isinstance(value, str)]
    if isinstance(node.items, dict):
        texts.extend(key for key in node.items if isinstance(key, str))
    is_short = max_chars is None or max(map(len, texts), default=0) <= max_chars
    if is_short and is_unicode("".join(texts)):  # halves of a pair stay two lone surrogates
        return
    for key, value in _entries(node.items):
        if fault := _fault(value, max_chars):
            raise BadRequest(f"{_path(_Node(value, node, key), name)}: {fault}")
        if fault := _fault(key, max_chars):
            raise BadRequest(f"a key of {_path(node, name)}: {fault}")


def _fault(value: Any, max_chars: int | None) -> str | None:
    if not isinstance(value, str):
        return None
    if not is_unicode(value):
        return "expected valid Unicode, got a lone surrogate"
    if max_chars is not None and len(value) > max_chars:
        return f"expected at most {max_chars} characters, got {len(value)}"
    return None


def _has(kinds: set[type], wanted: Any) -> bool:
    return any(issubclass(kind, wanted) for kind in kinds)


def _values(items: Any) -> Any:
    return items.values() if isinstance(items, dict) else items


def _entries(items: Any) -> Any:
    return items.items() if isinstance(items, dict) else enumerate(items)


def _path(node: _Node, name: str) -> str:
    keys = []
    while node.parent is not None:
        keys.append(f"[{node.key!r:.40}]")
        node = node.parent
    return name + "".join(reversed(keys[:-1]))  # the outermost one is ours
