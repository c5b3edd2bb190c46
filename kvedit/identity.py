"""Digests that no two different inputs share by accident of spelling.

Plain concatenation lets ("a", "bc") and ("ab", "c") collide, and lets an absent field pass for an
empty one. Here every field is written as its own name, a presence byte, and a length.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Mapping


def digest(domain: str, fields: Mapping[str, bytes | None]) -> str:
    """sha256 hex over ``domain`` and ``fields`` in name order; ``None`` differs from ``b""``.

    ``domain`` separates uses: equal fields under two domains give two digests.
    """
    state = hashlib.sha256()
    _feed(state, domain.encode())
    for name in sorted(fields):
        _feed(state, name.encode())
        value = fields[name]
        if value is None:
            state.update(b"\0")
        else:
            state.update(b"\1")
            _feed(state, value)
    return state.hexdigest()


def text_bytes(text: str | None) -> bytes | None:
    """UTF-8 of ``text``. A lone surrogate (JSON can spell one) keeps its own encoding."""
    return None if text is None else text.encode("utf-8", "surrogatepass")


def ids_bytes(ids: array[int]) -> bytes:
    """Token ids as little-endian int64, whatever the machine's order."""
    return struct.pack(f"<{len(ids)}q", *ids)


def host_identity(fields: Mapping[str, str | None]) -> str:
    """One string for all that shapes KV bytes on this server besides the tokens.

    ``fields`` are the host's facts: model and revision, weight epoch, kv dtype, rope signature,
    page size, tensor parallel layout. Any change to any of them changes the result.
    """
    return digest("kvedit-host", {name: text_bytes(value) for name, value in fields.items()})


def segment_identity(
    *, token_ids: array[int], compile_prefix: array[int], namespace: str, host: str
) -> str:
    """What a client sees as a skill's ``id``: equal means equal KV, position aside."""
    return digest(
        "kvedit-segment",
        {
            "token_ids": ids_bytes(token_ids),
            "compile_prefix": ids_bytes(compile_prefix),
            "namespace": text_bytes(namespace),
            "host": text_bytes(host),
        },
    )


def _feed(state: hashlib._Hash, value: bytes) -> None:
    state.update(struct.pack("<Q", len(value)))
    state.update(value)
