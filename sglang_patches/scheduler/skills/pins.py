"""Pins: tree locks on skills, within a budget, and soft.

A hard pin starves the pool (a known failure of session pins elsewhere), so a pin yields when
the head of the queue could not be admitted otherwise: oldest first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvedit.errors import PinBudgetExceeded


@dataclass(frozen=True, slots=True)
class Pin:
    segment: int
    num_tokens: int
    node: Any
    lock: Any


class PinBook:
    """Pinned segments in the order they were pinned. Token counts in tokens of the KV pool."""

    def __init__(
        self,
        budget_tokens: int,
        lock: Callable[[Any], Any],
        unlock: Callable[[Any], None],
    ) -> None:
        self.budget_tokens = budget_tokens
        self._lock = lock
        self._unlock = unlock
        self._pins: dict[int, Pin] = {}
        self._promised: dict[int, int] = {}  # segment -> tokens, compile not done yet

    def __contains__(self, segment: int) -> bool:
        return segment in self._pins

    @property
    def num_tokens(self) -> int:
        return sum(pin.num_tokens for pin in self._pins.values())

    def promise(self, segment: int, num_tokens: int) -> None:
        """Set tokens of the budget aside. Raises PinBudgetExceeded with the figures."""
        self.check(num_tokens, but=segment)
        self._promised[segment] = num_tokens

    def fits(self, num_tokens: int, but: int | None = None) -> bool:
        """Whether ``num_tokens`` more fit the budget (what segment ``but`` holds not counted)."""
        return self._held(but) + num_tokens <= self.budget_tokens

    def _held(self, but: int | None) -> int:
        held = sum(pin.num_tokens for pin in self._pins.values() if pin.segment != but)
        return held + sum(tokens for number, tokens in self._promised.items() if number != but)

    def check(self, num_tokens: int, but: int | None = None) -> None:
        """Raises PinBudgetExceeded if ``num_tokens`` more would not fit the budget."""
        if not self.fits(num_tokens, but):
            held = self._held(but)
            raise PinBudgetExceeded(
                f"kvedit: pin: expected at most {self.budget_tokens} pinned tokens "
                f"(KVEDIT_PIN_FRACTION of the pool), got {held} held + {num_tokens} asked for"
            )

    def pin(self, segment: int, num_tokens: int, node: Any) -> None:
        """Lock ``node``; pinning again moves the lock to the new node."""
        self.release(segment)
        self._pins[segment] = Pin(segment, num_tokens, node, self._lock(node))

    def release(self, segment: int) -> bool:
        """Unlock a segment and return its budget; False if it held no pin."""
        self._promised.pop(segment, None)
        pin = self._pins.pop(segment, None)
        if pin is None:
            return False
        self._unlock(pin.lock)
        return True

    def release_oldest(self) -> int | None:
        """Unlock the oldest pin; returns its segment number, None if there is none."""
        segment = next(iter(self._pins), None)
        if segment is not None:
            self.release(segment)
        return segment

    def release_all(self) -> None:
        """Unlock everything and take back every promise: segments are about to be renumbered."""
        while self.release_oldest() is not None:
            pass
        self._promised.clear()

    def forget(self) -> None:
        """The tree was emptied: its locks are gone with it."""
        self._pins.clear()
        self._promised.clear()

    def suspended(self) -> Suspension:
        """Context in which no pin holds a lock (the host's sanity check expects none at idle)."""
        return Suspension(self)


class Suspension:
    def __init__(self, book: PinBook) -> None:
        self._book = book

    def __enter__(self) -> None:
        for pin in self._book._pins.values():
            self._book._unlock(pin.lock)

    def __exit__(self, *exc: object) -> None:
        book = self._book
        book._pins = {
            segment: Pin(segment, pin.num_tokens, pin.node, book._lock(pin.node))
            for segment, pin in book._pins.items()
        }
