"""Rivals: which conversations of a namespace were given the same reply at the same place.

A turn with fields that a later request may go on with leaves a trace, whatever name it was sent
under: its client may send another name the next time, or none, and would seem to go on with a
look-alike that has this name. A trace is kept
while a turn of it is an entry of the ledger, and then among the MAX_TRACES that were left last,
for a conversation that is left alone would seem to be the only one.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

Heard = tuple[str, int, int, int]  # namespace, length and hash of the masked ids, hash of the reply
Trace = tuple[int | None, int | None]  # lineage, hash of the text served; None: several
Unread = tuple[str, int, int]  # namespace, field number, hash of the reply

MAX_TRACES = 65_536


class Rivals:
    """Memory: at most one trace for each entry, MAX_TRACES of others and as many unread replies.
    Each step takes constant time."""

    def __init__(self) -> None:
        self._num_entries: Counter[Heard] = Counter()
        self._kept: dict[Heard, Trace] = {}  # of which there are entries
        self._left: OrderedDict[Heard, Trace] = OrderedDict()  # of which there are none
        self._unread: OrderedDict[Unread, None] = OrderedDict()

    def keep(self, heard: Heard, trace: Trace) -> None:
        """A turn became an entry."""
        known = self._kept.get(heard) or self._left.pop(heard, trace)
        self._kept[heard] = _joined(known, trace)
        self._num_entries[heard] += 1

    def leave(self, heard: Heard) -> None:
        """A turn is no entry any more."""
        self._num_entries[heard] -= 1
        if not self._num_entries[heard]:
            del self._num_entries[heard]
            self._put(heard, self._kept.pop(heard))

    def note(self, heard: Heard, trace: Trace) -> None:
        """A turn that did not become an entry."""
        if heard in self._kept:
            self._kept[heard] = _joined(self._kept[heard], trace)
        else:
            self._put(heard, _joined(self._left.pop(heard, trace), trace))

    def of_entry(self, heard: Heard) -> Trace:
        """Who was given this reply here; a None in it: several. KeyError where it is no entry's."""
        return self._kept[heard]

    def note_unread(self, unread: Unread) -> None:
        """A turn whose value could not be read was given this reply."""
        self._unread[unread] = None
        while len(self._unread) > MAX_TRACES:
            self._unread.popitem(last=False)

    def is_unread(self, unread: Unread) -> bool:
        """Whether such a turn was given this reply; the MAX_TRACES noted last are known."""
        return unread in self._unread

    def _put(self, heard: Heard, trace: Trace) -> None:
        self._left[heard] = trace
        while len(self._left) > MAX_TRACES:
            self._left.popitem(last=False)


def _joined(one: Trace, other: Trace) -> Trace:
    return (
        one[0] if one[0] == other[0] else None,
        one[1] if one[1] == other[1] else None,
    )
