"""The ledger: what was served for earlier turns of a conversation.

Clients send whole prompts, not conversation ids, so a conversation is known by its text: an
entry belongs to a request whose masked ids begin with the entry's. Text alone does not prove it:
two users may ask the same question and differ only in the field. So an entry is used only

    when the request's claim covers every turn of its scope (a token, or a name where names are
    trusted, see ``proofs``), or
    when every field of the prompt is public in the namespace (``cross_request``), or
    where replies count, when it goes on with the reply that the entry's request was given (or
    with an earlier reply of the conversation that the entry is of), and no other conversation
    of the namespace, whatever its name, remembered or forgotten, was given the same reply at
    the same place with another text served (see ``rivals``).

Everything else is served as sent, for a reason that does not depend on what is remembered:
NOT_PROVEN, or NO_BASE where the first two hold, or for a token of an earlier epoch.
A restart forgets the rivals too: only a token, a trusted name or a namespace of its own keeps a
conversation apart from one that reads the same in every word.
One ledger per rank, fed with the same calls in the same order.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvedit.edit.masked import Masked, prefix_hashes
from kvedit.edit.proofs import Claim, Scope
from kvedit.edit.replies import TextOf, goes_on, heard_part
from kvedit.edit.rivals import Heard, Rivals, Trace
from kvedit.edit.served_path import ServedPath
from kvedit.reason import Reason

Place = tuple[Scope, int, int]  # scope, length and hash of the masked ids

MAX_ENTRIES = 8192
MAX_TOKENS = 8_000_000
MAX_PER_PLACE = 8


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
    is_trimmed: bool = False  # its client was shown less of it: a stop text was cut off

    @property
    def num_tokens(self) -> int:
        """What counts towards MAX_TOKENS: masked and served ids."""
        return len(self.masked) + len(self.path.ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The longest entries of a request's conversation, the newest first, and who the request is.

    reason: why there are none: NOT_PROVEN, or NO_BASE if the caller's would have been found.
    """

    entries: tuple[Entry, ...] = ()
    length: int = 0  # masked tokens
    lineage: int | None = None
    depth: int = 0
    reason: Reason | None = None


class Ledger:
    """Entries by scope, length and hash of their masked ids; of more than MAX_ENTRIES, or
    MAX_TOKENS masked and served ids, the least recently used go."""

    def __init__(self) -> None:
        self._places: dict[Place, list[Entry]] = {}
        self._order: OrderedDict[Entry, Place] = OrderedDict()
        self._lengths: dict[Scope, Counter[int]] = {}
        self._rivals = Rivals()
        self._num_tokens = 0
        self._last_lineage = 0

    def __len__(self) -> int:
        return len(self._order)

    def find(
        self,
        claim: Claim,
        masked: Masked,
        limit: int,
        *,
        public: bool,
        text_of: TextOf,
        marks: frozenset[int],
    ) -> Found:
        """The longest entries that masked.ids[:limit] begins with and that are of its conversation.

        public: every field of the request may be shown to anybody in the namespace.
        text_of(ids): their bytes, to compare a reply that was tokenised anew.
        marks: control tokens, one of which ends a message; raw text has none.
        """
        scope, is_proven = claim.scope, claim.is_proven or public
        behind: list[tuple[int, list[Entry]]] = []  # they stand behind a reply yet to be found
        lengths = self._lengths.get(scope, ()) if is_proven or claim.by_reply else ()
        for length in sorted(lengths, reverse=True):
            entries = self._at(scope, masked, length) if length <= limit else []
            if entries and (claim.is_proven or (public and not claim.by_reply)):
                return self._found(entries, length, _only(e.lineage for e in entries))
            proven = [e for e in entries if _goes_on(e, masked, length, text_of, marks)]
            if public and entries:  # text that is nobody's own makes nobody's lineage hers
                return self._found(entries, length, self._lineage_of(proven))
            if not proven:
                behind.append((length, [e for e in entries if e.depth]))
            elif _disagree(proven) or any(map(self._is_rivalled, proven)):
                break  # of several conversations: none is proven to be the caller's
            else:
                lineage = self._lineage_of(proven)
                own, length = _longest_of(lineage, [*behind, (length, proven)])
                return self._found(own, length, lineage)
        is_known = is_proven or claim.is_expired
        return Found(reason=Reason.NO_BASE if is_known else Reason.NOT_PROVEN)

    def _found(self, entries: Sequence[Entry], length: int, lineage: int | None) -> Found:
        """lineage: None if nobody knows which conversation this is: it begins its own line."""
        for entry in entries:
            self._order.move_to_end(entry)
        depth = 0 if lineage is None else 1
        return Found(entries=tuple(reversed(entries)), length=length, lineage=lineage, depth=depth)

    @property
    def last_lineage(self) -> int:
        """The newest number that names a conversation; 0: none yet."""
        return self._last_lineage

    def forget_everything(self, last_lineage: int) -> None:
        """As after a restart: no entry and no trace of one, for the ranks disagree on them.
        Lineages go on behind ``last_lineage``, so that no old one names a new conversation."""
        self.clear()
        self._rivals = Rivals()
        self._last_lineage = last_lineage

    def new_lineage(self) -> int:
        """A number that names no conversation so far."""
        self._last_lineage += 1
        return self._last_lineage

    def record(self, scope: Scope, entry: Entry) -> None:
        """Keep a turn; it replaces an entry of the same conversation that was served the same."""
        place = _place(scope, entry.masked)
        self._rivals.keep(_heard_at(place, entry), _trace(entry))
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
            self._remove(next(iter(self._order)))

    def note_rival(self, namespace: str, entry: Entry) -> None:
        """A turn that is no base, but may be of a conversation that reads like a kept one."""
        place = _place((namespace, ""), entry.masked)
        self._rivals.note(_heard_at(place, entry), _trace(entry))

    def note_unread(self, namespace: str, number: int, reply: array[int]) -> None:
        """A turn was given ``reply`` while its value of a field could not be read, so it is masked
        nowhere: any turn with that reply may be of a conversation that reads like its own."""
        self._rivals.note_unread((namespace, number, _hash(heard_part(reply))))

    def clear(self) -> None:
        """Forget every entry: what was served before is no base any more."""
        for entry, place in self._order.items():
            self._rivals.leave(_heard_at(place, entry))
        self._places.clear()
        self._order.clear()
        self._lengths.clear()
        self._num_tokens = 0

    def _at(self, scope: Scope, masked: Masked, length: int) -> list[Entry]:
        place = scope, length, int(masked.hashes[length])
        bucket = self._places.get(place)
        if not bucket:
            return []
        begins = masked.ids[:length]
        return [entry for entry in bucket if entry.masked == begins]

    def _is_rivalled(self, entry: Entry) -> bool:
        """Whether a turn of another conversation of the namespace fits as well as this one."""
        heard = _heard_at(self._order[entry], entry)
        namespace, _, _, reply = heard
        if any(self._rivals.is_unread((namespace, w.number, reply)) for w in entry.path.windows):
            return True
        return self._rivals.of_entry(heard) == (None, None)

    def _lineage_of(self, proven: Sequence[Entry]) -> int | None:
        """The only conversation that a request which goes on with these entries can be of, where
        look-alikes that were served the same text count as well."""
        heard = [_heard_at(self._order[entry], entry) for entry in proven]
        return _only(self._rivals.of_entry(one)[0] for one in heard)

    def _remove(self, entry: Entry) -> None:
        place = self._order.pop(entry)
        self._rivals.leave(_heard_at(place, entry))
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
    return scope, len(masked), _hash(masked)


def _goes_on(
    entry: Entry, masked: Masked, length: int, text_of: TextOf, marks: frozenset[int]
) -> bool:
    """Whether the request continues with the reply that the entry's request was given."""
    tail = masked.real[masked.to_real(length) :]
    between = entry.path.ids[entry.lines_end : entry.reply_start]
    if not entry.reply or tail[: len(between)] != between:
        return False
    return goes_on(
        tail[len(between) :],
        entry.reply,
        is_trimmed=entry.is_trimmed,
        text_of=text_of,
        marks=marks,
    )


def _longest_of(
    lineage: int | None, places: Sequence[tuple[int, Sequence[Entry]]]
) -> tuple[Sequence[Entry], int]:
    """The entries of the proven conversation at the longest of ``places``, the last of which is
    where it was proven. None where it is one of several: they may have parted since."""
    length, proven = places[-1]
    for longer, entries in places[:-1]:
        own = [entry for entry in entries if entry.lineage == lineage]
        if own:
            return own, longer
    return proven, length


def _only(lineages: Iterable[int | None]) -> int | None:
    """The one that all of them are; None: several, or none at all."""
    found = set(lineages)
    return found.pop() if len(found) == 1 else None


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


def _heard_at(place: Place, entry: Entry) -> Heard:
    """What a request must hold to go on with the reply of an entry at ``place``."""
    (namespace, _), length, masked = place
    return namespace, length, masked, _hash(heard_part(entry.reply))


def _trace(entry: Entry) -> Trace:
    return entry.lineage, _hash(entry.path.ids[: entry.lines_end])


def _hash(ids: array[int]) -> int:
    return int(prefix_hashes(ids)[-1])
