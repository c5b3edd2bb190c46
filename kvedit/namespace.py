"""Which requests may share KV: the namespace of a request, as one string."""

from __future__ import annotations

from kvedit.errors import BadRequest
from kvedit.identity import digest, text_bytes

SHARED = "shared"  # skills every namespace may use; no tag equals it, tags start with "ns:"


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
