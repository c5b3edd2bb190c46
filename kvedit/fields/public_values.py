"""Values of fields whose declaration makes them public inside their namespace."""

from __future__ import annotations

from collections import OrderedDict

MAX_VALUES = 4  # of a field, the newest
MAX_FIELDS = 4096


class SeenValues:
    """The newest values of each (namespace, field number). One per rank, fed alike."""

    def __init__(self) -> None:
        self._values: OrderedDict[tuple[str, int], list[str]] = OrderedDict()

    def add(self, namespace: str, number: int, value: str) -> None:
        """``value`` was served; the oldest of more than MAX_VALUES goes."""
        values = self._values.setdefault((namespace, number), [])
        if value in values:
            values.remove(value)
        values.append(value)
        del values[:-MAX_VALUES]
        self._values.move_to_end((namespace, number))
        while len(self._values) > MAX_FIELDS:
            self._values.popitem(last=False)

    def of(self, namespace: str, number: int) -> tuple[str, ...]:
        """The newest first."""
        return tuple(reversed(self._values.get((namespace, number), ())))

    def clear(self) -> None:
        """As after a restart."""
        self._values.clear()
