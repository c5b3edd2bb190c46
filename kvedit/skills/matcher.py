"""Find the registered skills inside a prompt: exact, and quick enough to run for every request.

Each segment is anchored at its first 8 token ids, and at the 8 ids behind each of its first 1..8
(there a tokenizer may have merged the skill's edge with the text before it). A hash of 8 ids only
proposes: every match is compared id by id, so a collision costs time and never correctness.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvedit.namespace import SHARED
from kvedit.skills.segment import Segment

ANCHOR_TOKENS = 8
MAX_SKIPPED_TOKENS = 8
TAIL_TOKENS = 16  # how much of the prompt is decoded to look for the skipped text

MAX_DECODES = 1024  # per prompt, some ms: no honest prompt comes near, a crafted one loses splices

TailText = Callable[[int, int], str]

_BLOCK_TOKENS = 4096
_BLOOM_BITS = 20
_BLOOM_SHIFT = np.uint64(64 - _BLOOM_BITS)
_MIX_SHIFT = np.uint64(29)
_MIX = np.uint64(0x9E3779B97F4A7C15)
_STEPS = (  # (ids that one hash covers so far, odd multiplier of the left half)
    (1, np.uint64(0xD1342543DE82EF95)),
    (2, np.uint64(0xAF251AF3B0F025B5)),
    (4, np.uint64(0xB564EF22EC7AECE5)),
)


@dataclass(frozen=True, slots=True)
class Match:
    """prompt[prompt_start : +num_tokens) == skill[skill_start : +num_tokens), id by id."""

    number: int  # of the segment
    skill_start: int  # 0..8 skill tokens that the prompt spells with other ids
    prompt_start: int
    num_tokens: int  # at least 8


@dataclass(frozen=True, slots=True, eq=False)
class _Anchor:
    number: int
    skill_start: int
    token_ids: array[int]


class _Bucket:
    """Anchors with one hash in one namespace, by the text that the prompt must show in front.

    A lookup by text keeps the cost of a position independent of the number of skills: a prompt
    may be made to propose all of them at each of its positions.
    """

    def __init__(self) -> None:
        self._by_head: dict[str, list[_Anchor]] = {}  # "": nothing is skipped
        self._head_lengths: list[int] = []

    def __bool__(self) -> bool:
        return bool(self._by_head)

    @property
    def skips(self) -> bool:
        """Is there an anchor for which the prompt's text matters?"""
        return bool(self._head_lengths)

    def add(self, anchor: _Anchor, head_text: str) -> None:
        self._by_head.setdefault(head_text, []).append(anchor)
        self._head_lengths = sorted({len(head) for head in self._by_head if head})

    def remove(self, number: int) -> None:
        kept = {
            h: [a for a in anchors if a.number != number] for h, anchors in self._by_head.items()
        }
        self._by_head = {head: anchors for head, anchors in kept.items() if anchors}
        self._head_lengths = sorted({len(head) for head in self._by_head if head})

    def unskipped(self) -> Sequence[_Anchor]:
        return self._by_head.get("", ())

    def behind(self, text: str) -> Iterator[_Anchor]:
        """Anchors whose skipped text is how ``text`` ends."""
        for length in self._head_lengths:
            if length <= len(text):
                yield from self._by_head.get(text[-length:], ())


class Matcher:
    """Holds anchors of segments; ``find`` reads prompts. Not thread safe."""

    def __init__(self) -> None:
        self._anchors: dict[int, dict[str, _Bucket]] = {}  # by hash, by namespace
        self._hashes: dict[int, tuple[str, list[int]]] = {}  # number -> (namespace, hashes)
        self._bloom: npt.NDArray[np.bool_] = np.zeros(1 << _BLOOM_BITS, dtype=np.bool_)

    def __contains__(self, number: object) -> bool:
        return number in self._hashes

    def __len__(self) -> int:
        return len(self._hashes)

    def add(self, segment: Segment, head_texts: Sequence[str]) -> None:
        """Search for ``segment`` from now on.

        ``head_texts[e]`` is the decoded skill[:e] for e = 0..8 (special tokens kept). A head
        that is empty or holds U+FFFD (a split character) proves nothing, so no match skips it.
        Raises ValueError if the number is there already.
        """
        if segment.number in self._hashes:
            raise ValueError(f"kvedit: matcher: expected a new segment, got {segment.number}")
        starts = range(min(len(head_texts), MAX_SKIPPED_TOKENS + 1))
        head = segment.token_ids[: MAX_SKIPPED_TOKENS + ANCHOR_TOKENS]
        hashes: list[int] = []
        for e, value in zip(starts, _window_hashes(head).tolist(), strict=False):
            if e > 0 and not _proves_text(head_texts[e]):
                continue
            bucket = self._anchors.setdefault(value, {}).setdefault(segment.namespace, _Bucket())
            anchor = _Anchor(segment.number, e, segment.token_ids)
            bucket.add(anchor, head_texts[e] if e > 0 else "")
            self._bloom[value >> (64 - _BLOOM_BITS)] = True
            hashes.append(value)
        self._hashes[segment.number] = (segment.namespace, hashes)

    def remove(self, number: int) -> None:
        """Forget a segment. Raises KeyError if it is not there."""
        namespace, hashes = self._hashes.pop(number)
        for value in set(hashes):
            owners = self._anchors[value]
            owners[namespace].remove(number)
            if not owners[namespace]:
                del owners[namespace]
            if not owners:
                del self._anchors[value]
        self._bloom[:] = False
        for value in self._anchors:
            self._bloom[value >> (64 - _BLOOM_BITS)] = True

    def find(
        self,
        ids: array[int],
        namespace: str,
        tail_text: TailText,
        only: Collection[int] | None = None,
    ) -> list[Match]:
        """Non-overlapping matches of the namespace's and the shared segments, ascending.

        Where several overlap: the leftmost start, then the longest, then the lowest number.
        ``ids``: array('q') of the prompt. ``tail_text(a, b)`` decodes ids[a:b) with special
        tokens kept. ``only`` limits the search to these segment numbers.
        """
        search = _Search(ids, tail_text, only)
        matches: list[Match] = []
        for start, value in self._proposed(ids):
            owners = self._anchors.get(value)
            if start < search.free_from or owners is None:
                continue
            buckets = [owners[owner] for owner in {namespace, SHARED} if owner in owners]
            match = search.best(start, buckets)
            if match is not None:
                matches.append(match)
                search.free_from = start + match.num_tokens
        return matches

    def _proposed(self, ids: array[int]) -> Iterator[tuple[int, int]]:
        """(position, hash) where the bloom table knows the hash, ascending.

        Block by block: temporaries this small stay in the processor's cache, and the allocator
        does not go back to the operating system for them.
        """
        for begin in range(0, len(ids) - ANCHOR_TOKENS + 1, _BLOCK_TOKENS):
            hashes = _window_hashes(ids[begin : begin + _BLOCK_TOKENS + ANCHOR_TOKENS - 1])
            known = self._bloom.take((hashes >> _BLOOM_SHIFT).view(np.intp))
            at = np.flatnonzero(known)
            yield from zip((at + begin).tolist(), hashes[at].tolist(), strict=True)


class _Search:
    """One walk over one prompt, from left to right."""

    def __init__(self, ids: array[int], tail_text: TailText, only: Collection[int] | None) -> None:
        self.free_from = 0  # end of the last match
        self._ids = ids
        self._view = np.frombuffer(ids, dtype=np.int64) if ids else np.zeros(0, dtype=np.int64)
        self._tail_text = tail_text
        self._only = only
        # Both by the ids of the window: a prompt that repeats itself is looked at once.
        self._tails: dict[bytes, str] = {}
        self._behind: dict[tuple[_Bucket, bytes], tuple[_Anchor, ...]] = {}

    def best(self, start: int, buckets: Sequence[_Bucket]) -> Match | None:
        """The longest match that starts here; on a tie the lowest number, then the lowest e."""
        ids, best = self._ids, None
        for anchor in self._candidates(start, buckets):
            if self._only is not None and anchor.number not in self._only:
                continue
            floor = ANCHOR_TOKENS
            if best is not None:
                wins_tie = (anchor.number, anchor.skill_start) < (best.number, best.skill_start)
                floor = best.num_tokens + (0 if wins_tie else 1)
            # Too short to win? Most of many look-alikes end here, at one id.
            e, last = anchor.skill_start, anchor.skill_start + floor - 1
            if start + floor > len(ids) or last >= len(anchor.token_ids):
                continue
            if anchor.token_ids[last] != ids[start + floor - 1]:
                continue
            num_tokens = self._common_tokens(start, anchor)
            if num_tokens >= floor:
                best = Match(anchor.number, e, start, num_tokens)
        return best

    def _candidates(self, start: int, buckets: Sequence[_Bucket]) -> Iterator[_Anchor]:
        """Anchors proposed here whose skipped text, if any, is the prompt's as well."""
        for bucket in buckets:
            yield from bucket.unskipped()
            if bucket.skips and start > 0:
                yield from self._behind_text(bucket, start)

    def _common_tokens(self, start: int, anchor: _Anchor) -> int:
        """How many ids agree from here on."""
        e = anchor.skill_start
        num_left = min(len(self._ids) - start, len(anchor.token_ids) - e)
        skill = np.frombuffer(anchor.token_ids, dtype=np.int64)
        differ = self._view[start : start + num_left] != skill[e : e + num_left]
        first = int(differ.argmax())
        return first if differ[first] else num_left

    def _behind_text(self, bucket: _Bucket, start: int) -> Sequence[_Anchor]:
        begin = max(0, start - TAIL_TOKENS)
        window = self._ids[begin:start].tobytes()
        anchors = self._behind.get((bucket, window))
        if anchors is None:
            text = self._text(window, begin, start)
            anchors = self._behind[bucket, window] = tuple(bucket.behind(text))
        return anchors

    def _text(self, window: bytes, begin: int, stop: int) -> str:
        """Decoded ids[begin:stop), or "" once the prompt has used up its share of decodes."""
        if window not in self._tails:
            if len(self._tails) >= MAX_DECODES:
                return ""
            self._tails[window] = self._tail_text(begin, stop)
        return self._tails[window]


def _proves_text(head_text: str) -> bool:
    return head_text != "" and "\ufffd" not in head_text


def _window_hashes(ids: array[int]) -> npt.NDArray[np.uint64]:
    """uint64 [max(0, len(ids) - 7)]: a hash of each window of 8 ids, by doubling."""
    if len(ids) < ANCHOR_TOKENS:
        return np.zeros(0, dtype=np.uint64)
    hashes: npt.NDArray[np.uint64] = np.frombuffer(ids, dtype=np.uint64)
    for width, multiplier in _STEPS:
        right = hashes[width:]
        hashes = hashes[:-width] * multiplier
        hashes += right
    # So far the last id reached the low bits only, and the bloom table is asked with the high.
    hashes ^= hashes >> _MIX_SHIFT
    hashes *= _MIX
    return hashes
