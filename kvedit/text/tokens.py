"""What a token id is as bytes, so that text is found in ids without decoding a whole prompt.

Decoding and encoding again is neither fast nor faithful; joining the bytes of each token is both.
Two families of tokenizers can be read that way: byte-level BPE (a token is a string of stand-in
characters, one per byte) and sentencepiece with byte fallback (a space is written U+2581).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvedit.errors import Unsupported

SAMPLE = "Order_status: open\r\n\tna\u00efve  caf\u00e9 \u2014 \u6771\u4eac \U0001f642 x=1;\n\nend"
METASPACE = "\u2581"
# An id that has no text: a byte that no UTF-8 text contains, so that no pattern ever matches it.
UNKNOWN = b"\xff"


class Tokens(Protocol):
    """What locating text in token ids needs to know about a tokenizer."""

    @property
    def special_ids(self) -> frozenset[int]: ...
    @property
    def special_texts(self) -> frozenset[str]: ...
    @property
    def bos_id(self) -> int | None: ...
    def encode(self, text: str) -> array[int]: ...
    def token_bytes(self, token_id: int) -> bytes: ...
    def joined(self, ids: Sequence[int]) -> tuple[bytes, NDArray[np.int64]]: ...


class TokenText:
    """``Tokens`` over a Hugging Face tokenizer. The bytes of each id are looked up once.

    Raises Unsupported when the bytes of its tokens cannot be told (tried on a sample text).
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = {int(i): str(t) for i, t in tokenizer.added_tokens_decoder.items()}
        for token_id in tokenizer.all_special_ids:
            added.setdefault(int(token_id), str(tokenizer.convert_ids_to_tokens(int(token_id))))
        # some vocabularies add runs of spaces or newlines: these are text, not marks
        marks = {i: t for i, t in added.items() if t.replace(METASPACE, " ").strip()}
        self.special_ids = frozenset(marks)
        self.special_texts = frozenset(marks.values())
        bos = tokenizer.bos_token_id
        self.bos_id: int | None = None if bos is None else int(bos)
        self._size = max([len(tokenizer), *(i + 1 for i in added)])
        self._pieces: list[bytes] = [UNKNOWN] * (self._size + 1)  # the last: any id outside
        self._lengths = np.ones(self._size + 1, dtype=np.int64)
        self._known = np.zeros(self._size + 1, dtype=np.bool_)
        self._known[self._size] = True
        for token_id, text in added.items():
            self._put(token_id, text.replace(METASPACE, " ").encode())
        self._to_bytes = self._find_reader()

    def encode(self, text: str) -> array[int]:
        """int64 ids of ``text`` alone: no BOS, no EOS."""
        return array("q", self._tokenizer.encode(text, add_special_tokens=False))

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 of one token, perhaps a part of a character; UNKNOWN for an id without text."""
        return self.joined((token_id,))[0]

    def joined(self, ids: Sequence[int]) -> tuple[bytes, NDArray[np.int64]]:
        """Bytes of all ``ids`` and, per id, the offset where its bytes end (int64 [len(ids)])."""
        rows = np.asarray(ids, dtype=np.int64)
        rows = np.where((rows < 0) | (rows >= self._size), self._size, rows)
        if not self._known[rows].all():
            self._learn(np.unique(rows[~self._known[rows]]).tolist())
        data = b"".join(map(self._pieces.__getitem__, rows.tolist()))
        return data, np.cumsum(self._lengths[rows])

    def _learn(self, ids: list[int]) -> None:
        for token_id, token in zip(ids, self._tokenizer.convert_ids_to_tokens(ids), strict=True):
            self._put(token_id, UNKNOWN if token is None else self._to_bytes(token))

    def _put(self, token_id: int, piece: bytes) -> None:
        self._pieces[token_id] = piece
        self._lengths[token_id] = len(piece)
        self._known[token_id] = True

    def _find_reader(self) -> Callable[[str | bytes], bytes]:
        ids = list(self.encode(SAMPLE))
        tokens = self._tokenizer.convert_ids_to_tokens(ids)
        reasons = []
        for name, reader in READERS.items():
            got = b"".join(map(reader, tokens))
            # a tokenizer may put one space in front of every text
            if got in (SAMPLE.encode(), b" " + SAMPLE.encode()):
                return reader
            reasons.append(
                f"kvedit: tokenizer read as {name}: expected the bytes of the sample text, "
                f"got {got[:40]!r}"
            )
        raise Unsupported(reasons)


def _byte_level_table() -> Mapping[str, int]:
    """Byte-level BPE writes a printable byte as itself, the others from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


_BYTE_LEVEL = _byte_level_table()


def _read_byte_level(token: str | bytes) -> bytes:
    if isinstance(token, bytes):  # some tokenizers keep their vocabulary as bytes
        return token
    codes = [_BYTE_LEVEL.get(char) for char in token]
    return bytes(c for c in codes if c is not None) if None not in codes else UNKNOWN


def _read_metaspace(token: str | bytes) -> bytes:
    if isinstance(token, bytes):
        return UNKNOWN
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes.fromhex(token[3:5])
    return token.replace(METASPACE, " ").encode()


READERS: Mapping[str, Callable[[str | bytes], bytes]] = {
    "byte-level BPE": _read_byte_level,
    "sentencepiece": _read_metaspace,
}
