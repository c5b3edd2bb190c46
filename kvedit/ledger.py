"""The ledger: what was served for earlier turns of a conversation.

Clients send whole prompts, not conversation ids, so a conversation is known by its text: an
entry belongs to a request whose masked ids begin with the entry's. Text alone does not prove it:
two users may ask the same question and differ only in the field. So an entry is used only

    when the request names the conversation, or
    when it goes on with the reply that the entry's request was given (or the entry itself stands
    behind such a reply), and no other conversation's entry fits as well with another text served.

Everything else is served as sent. One ledger per rank, fed with the same calls in the same order.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvedit.masks import Masked, common_prefix
from kvedit.served import ServedPath

Scope = tuple[str, str]  # (namespace tag, name of the conversation or "")
Place = tuple[Scope, int, int]  # scope, length and hash of the masked ids

MAX_ENTRIES = 8192
MAX_TOKENS = 8_000_000
MAX_PER_PLACE = 8
PROOF_TOKENS = 8  # of the reply; all of it when it is shorter
PROOF_BYTES = 32  # when the client's text is tokenised otherwise than the model wrote it

TextOf = Callable[["array[int]"], bytes]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Entry:
    """One turn, up to the anchor in the client's masked ids, up to the last cached token as served.

    path[:anchor] stands for the client's text up to its anchor, path[anchor:lines_end] are the
    lines of this turn, path[lines_end:reply_start] is the client's text behind the anchor, and
    the rest is what the tree holds of the reply (all but its last token).
    """

    masked: array[int]
    path: ServedPath
    anchor: int
    lines_end: int
    reply_start: int
    lineage: int  # names the conversation
    depth: int  # 1: a reply of the conversation is in the masked ids
    reply: array[int]

    @property
    def num_tokens(self) -> int:
        return len(self.masked) + len(self.path.ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The longest entries of a request's conversation, the newest first, and who the request is.

    reason: why there are none: "no_base" or "ambiguous_conversation".
    """

    entries: tuple[Entry, ...] = ()
    length: int = 0  # masked tokens
    lineage: int | None = None
    depth: int = 0
    reason: str = ""


class Ledger:
    def __init__(self) -> None:
        self._places: dict[Place, list[Entry]] = {}
        self._order: OrderedDict[Entry, Place] = OrderedDict()
        self._lengths: dict[Scope, Counter[int]] = {}
        self._num_tokens = 0
        self._last_lineage = 0

    def __len__(self) -> int:
        return len(self._order)

    def find(
        self, scope: Scope, masked: Masked, limit: int, *, public: bool, text_of: TextOf
    ) -> Found:
        """The longest entries that masked.ids[:limit] begins with and that are of its conversation.

        public: every field of the request may be shown to anybody in the namespace.
        text_of(ids): their bytes, to compare a reply that was tokenised anew.
        """
        proven_by_name = public or scope[1] != ""
        for length in sorted(self._lengths.get(scope, ()), reverse=True):
            if length > limit:
                continue
            entries = self._at(scope, masked, length)
            proven = [
                entry
                for entry in reversed(entries)
                if proven_by_name or entry.depth or _goes_on(entry, masked, length, text_of)
            ]
            if not proven:
                continue
            if not proven_by_name and _disagree(proven):
                return Found(reason="ambiguous_conversation")
            for entry in reversed(proven):
                self._order.move_to_end(entry)
            lineages = {entry.lineage for entry in proven}
            return Found(
                entries=tuple(proven),
                length=length,
                # of several look-alikes nobody knows which one this is: it begins its own line
                lineage=proven[0].lineage if len(lineages) == 1 else None,
                depth=1 if len(lineages) == 1 else 0,
            )
        return Found(reason="no_base")

    def new_lineage(self) -> int:
        self._last_lineage += 1
        return self._last_lineage

    def record(self, scope: Scope, entry: Entry) -> None:
        """Keep a turn; it replaces an entry of the same conversation that was served the same."""
        place = _place(scope, entry.masked)
        bucket = self._places.setdefault(place, [])
        for old in [old for old in bucket if _same_turn(old, entry)]:
            self._remove(old)
        bucket = self._places.setdefault(place, [])
        bucket.append(entry)
        self._order[entry] = place
        self._lengths.setdefault(scope, Counter())[len(entry.masked)] += 1
        self._num_tokens += entry.num_tokens
        while len(bucket) > MAX_PER_PLACE:
            self._remove(bucket[0])
        while len(self._order) > MAX_ENTRIES or (
            self._num_tokens > MAX_TOKENS and len(self._order) > 1
        ):
            self._forget_oldest()

    def clear(self) -> None:
        self._places.clear()
        self._order.clear()
        self._lengths.clear()
        self._num_tokens = 0

    def _at(self, scope: Scope, masked: Masked, length: int) -> list[Entry]:
        place = scope, length, int(masked.hashes[length])
        begins = masked.ids[:length]
        return [entry for entry in self._places.get(place, []) if entry.masked == begins]

    def _forget_oldest(self) -> None:
        """With it go the look-alikes of other conversations: one that is left alone would seem
        to be the only one."""
        oldest = next(iter(self._order))
        for entry in list(self._places[self._order[oldest]]):
            if entry is oldest or entry.lineage != oldest.lineage:
                self._remove(entry)

    def _remove(self, entry: Entry) -> None:
        place = self._order.pop(entry)
        self._places[place].remove(entry)
        if not self._places[place]:
            del self._places[place]
        scope, length, _ = place
        self._lengths[scope][length] -= 1
        if not self._lengths[scope][length]:
            del self._lengths[scope][length]
        if not self._lengths[scope]:
            del self._lengths[scope]
        self._num_tokens -= entry.num_tokens


def _place(scope: Scope, masked: array[int]) -> Place:
    return scope, len(masked), int(Masked(masked, ()).hashes[-1])


def _goes_on(entry: Entry, masked: Masked, length: int, text_of: TextOf) -> bool:
    """Whether the request continues with the reply that the entry's request was given."""
    tail = masked.real[masked.to_real(length) :]
    between = entry.path.ids[entry.lines_end : entry.reply_start]
    reply = entry.reply
    if not reply or tail[: len(between)] != between:
        return False
    tail = tail[len(between) :]
    if common_prefix(tail, reply) >= min(len(reply), PROOF_TOKENS):
        return True
    said = text_of(reply).strip()[:PROOF_BYTES]
    return bool(said) and text_of(tail[: 2 * len(reply)]).lstrip().startswith(said)


def _disagree(entries: Sequence[Entry]) -> bool:
    """Whether these are of several conversations and were not all served the same text."""
    first = entries[0]
    return len({entry.lineage for entry in entries}) > 1 and any(
        entry.path.ids[: entry.lines_end] != first.path.ids[: first.lines_end] for entry in entries
    )


def _same_turn(old: Entry, new: Entry) -> bool:
    return (
        old.lineage == new.lineage
        and old.path.ids[: old.reply_start] == (new.path.ids[: new.reply_start])
    )
