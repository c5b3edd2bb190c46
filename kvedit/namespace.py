"""Which requests may share KV: the namespace of a request, as one string."""

from __future__ import annotations

from kvedit.errors import BadRequest
from kvedit.identity import digest, text_bytes

MAX_SALT_CHARS = 512
# Skills and fields that every namespace may use. No tag equals it, tags start with "ns:".
SHARED = "shared"


def namespace_tag(cache_salt: str | None, extra_key: str | None, adapter: str | None) -> str:
    """The tag of one (cache_salt, extra_key, adapter) as received; no two tuples share a tag.

    ``None`` and ``""`` are different values. Raises BadRequest for a field that is not a string.
    """
    fields = {"cache_salt": cache_salt, "extra_key": extra_key, "adapter": adapter}
    for name, value in fields.items():
        if value is not None and not isinstance(value, str):
            raise BadRequest(
                f"kvedit: {name}: expected a string or nothing, got {type(value).__name__}"
            )
    return "ns:" + digest("kvedit-namespace", {k: text_bytes(v) for k, v in fields.items()})


def parse_namespace(value: object) -> tuple[str | None, str | None, list[str]]:
    """(cache_salt, extra_key, problems). A string is short for ``{"cache_salt": string}``."""
    if value is None:
        return None, None, []
    if isinstance(value, str):
        value = {"cache_salt": value}
    if not isinstance(value, dict):
        return None, None, [f"kvedit: namespace: expected a string or object, got {_kind(value)}"]
    problems = [
        f"kvedit: namespace.{key}: expected cache_salt or extra_key, got an unknown field"
        for key in map(str, value)
        if key not in ("cache_salt", "extra_key", "adapter")
    ]
    if value.get("adapter") is not None:
        problems.append("kvedit: namespace.adapter: expected null, adapters are refused")
    for key in ("cache_salt", "extra_key"):
        problems += _salt_problems(f"namespace.{key}", value.get(key))
    if problems:
        return None, None, problems
    return value.get("cache_salt"), value.get("extra_key"), []


def _salt_problems(path: str, value: object) -> list[str]:
    """The host reads an empty salt as none, so an empty one would name another namespace."""
    if value is None:
        return []
    if not isinstance(value, str) or not 0 < len(value) <= MAX_SALT_CHARS or not is_unicode(value):
        got = f"{len(value)} characters" if isinstance(value, str) else _kind(value)
        return [f"kvedit: {path}: expected a string of 1 to {MAX_SALT_CHARS} characters, got {got}"]
    return []


def is_unicode(text: str) -> bool:
    """Whether ``text`` can be written as UTF-8: no lone surrogate, which JSON can spell."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__


def may_meet(one: str, other: str) -> bool:
    """Whether things of the two namespaces can stand in one request."""
    return one == other or SHARED in (one, other)
