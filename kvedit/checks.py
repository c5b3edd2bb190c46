"""Checks of what a caller sends: skill names, token ids, seams. All raise BadRequest."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from kvedit.errors import BadRequest

MAX_NAME_CHARS = 200


def check_name(name: object) -> str:
    """A name is 1..200 printable characters that are safe as one part of a URL path."""
    if not isinstance(name, str):
        raise BadRequest(f"kvedit: name: expected a string, got {type(name).__name__}")
    if not 1 <= len(name) <= MAX_NAME_CHARS:
        raise BadRequest(
            f"kvedit: name: expected 1 to {MAX_NAME_CHARS} characters, got {len(name)}"
        )
    if not name.isprintable() or name.strip() != name:
        raise BadRequest(
            "kvedit: name: expected printable characters without spaces at the ends, "
            f"got {name[:40]!r}"
        )
    if "/" in name or "\\" in name or ".." in name or name == ".":
        raise BadRequest(f'kvedit: name: expected no "/", no "\\" and no "..", got {name[:40]!r}')
    return name


def check_ids(
    ids: object, vocab_size: int, max_len: int, *, field: str = "input_ids"
) -> array[int]:
    """``ids`` as array('q') of 1..max_len token ids in [0, vocab_size)."""
    if not isinstance(ids, (list, tuple, array)):
        raise BadRequest(f"kvedit: {field}: expected a list of ints, got {type(ids).__name__}")
    if not 1 <= len(ids) <= max_len:
        raise BadRequest(f"kvedit: {field}: expected 1 to {max_len} tokens, got {len(ids)}")
    bad = _first_bad(ids, vocab_size)
    if bad is not None:
        raise BadRequest(
            f"kvedit: {field}[{bad}]: expected an int in [0, {vocab_size}), got {_short(ids[bad])}"
        )
    return array("q", ids)


def check_seam(seam: object, num_tokens: int) -> int | None:
    """``seam``: None (the server's default) or 0..num_tokens tokens of the skill."""
    if seam is None:
        return None
    if isinstance(seam, bool) or not isinstance(seam, int) or not 0 <= seam <= num_tokens:
        raise BadRequest(
            f"kvedit: seam: expected an integer in [0, {num_tokens}] "
            f"(the skill has {num_tokens} tokens), got {_short(seam)}"
        )
    return seam


def _first_bad(ids: Iterable[object], vocab_size: int) -> int | None:
    for i, token_id in enumerate(ids):
        # bool is an int to Python, and True would pass for token 1
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            return i
    return None


def _short(value: object) -> str:
    """A caller's value may be huge; an error message never is."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    return repr(value)[:40] if isinstance(value, (str, int, float)) else type(value).__name__
