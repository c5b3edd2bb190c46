"""The pin book: a budget, the order of release, and no lock that is never given back."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvedit.errors import PinBudgetExceeded
from sglang_patches.scheduler.skills.pins import PinBook

BUDGET = 100


class Locks:
    """Counts the locks per node, as a tree does."""

    def __init__(self):
        self.held = []

    def lock(self, node):
        lock = ("lock", node, len(self.held))
        self.held.append(lock)
        return lock

    def unlock(self, lock):
        self.held.remove(lock)  # raises if it is not held

    def nodes(self):
        return sorted(node for _, node, _ in self.held)


@pytest.fixture
def locks():
    return Locks()


@pytest.fixture
def book(locks):
    return PinBook(BUDGET, locks.lock, locks.unlock)


def test_the_budget_counts_pins_and_promises(book):
    book.pin(1, 40, "a")
    book.promise(2, 50)
    assert book.fits(10) and not book.fits(11)
    with pytest.raises(PinBudgetExceeded, match="at most 100 .* 90 held [+] 11 asked for"):
        book.promise(3, 11)
    assert book.num_tokens == 40, "a promise locks nothing"


def test_pinning_again_moves_the_lock_and_keeps_one(book, locks):
    book.pin(1, 40, "a")
    book.promise(1, 90)  # its own 40 are not counted twice
    book.pin(1, 90, "b")
    assert (book.num_tokens, locks.nodes()) == (90, ["b"])
    assert not book.fits(11), "the promise became the pin"


def test_release_gives_budget_and_lock_back(book, locks):
    book.pin(1, 60, "a")
    book.promise(2, 30)
    assert book.release(1) and not book.release(1)
    assert not book.release(2), "a promise is no pin"
    assert (book.num_tokens, locks.nodes(), book.fits(BUDGET)) == (0, [], True)


def test_the_oldest_goes_first_and_pinning_again_makes_it_the_newest(book):
    for segment in (5, 3, 4):
        book.pin(segment, 10, segment)
    book.pin(5, 10, 50)
    assert [book.release_oldest() for _ in range(4)] == [3, 4, 5, None]


def test_release_all_takes_promises_back_too(book, locks):
    """Segments get new numbers then: a promise under an old one could never be redeemed."""
    book.pin(1, 60, "a")
    book.promise(2, 40)
    book.release_all()
    assert (locks.nodes(), book.fits(BUDGET)) == ([], True)


def test_forget_unlocks_nothing(book, locks):
    """After the tree was emptied its locks mean nothing; unlocking them would be an error."""
    book.pin(1, 60, "a")
    book.promise(2, 40)
    locks.held.clear()
    book.forget()
    assert book.fits(BUDGET) and 1 not in book


def test_suspension_takes_every_lock_away_and_back_also_after_an_error(book, locks):
    book.pin(1, 10, "a")
    book.pin(2, 10, "b")
    with pytest.raises(RuntimeError), book.suspended():
        assert locks.nodes() == []
        raise RuntimeError
    assert locks.nodes() == ["a", "b"]
    assert book.release(1) and locks.nodes() == ["b"], "the new lock is the one that counts"


class Pinning(RuleBasedStateMachine):
    """Any order of calls: budget kept where it is asked for, one lock per pin."""

    def __init__(self):
        super().__init__()
        self.locks = Locks()
        self.book = PinBook(BUDGET, self.locks.lock, self.locks.unlock)

    segments = st.integers(1, 4)

    @rule(segment=segments, num_tokens=st.integers(1, 60))
    def promise_and_pin(self, segment, num_tokens):
        fits = self.book.fits(num_tokens, but=segment)
        try:
            self.book.promise(segment, num_tokens)
        except PinBudgetExceeded:
            assert not fits
            return
        assert fits
        self.book.pin(segment, num_tokens, f"node{segment}")

    @rule(segment=segments, num_tokens=st.integers(1, 60))
    def promise_only(self, segment, num_tokens):
        if self.book.fits(num_tokens, but=segment) and segment not in self.book:
            self.book.promise(segment, num_tokens)

    @rule(segment=segments)
    def release(self, segment):
        self.book.release(segment)

    @rule()
    def release_oldest(self):
        self.book.release_oldest()

    @rule()
    def release_all(self):
        self.book.release_all()
        assert self.book.fits(BUDGET)

    @rule()
    def suspend(self):
        with self.book.suspended():
            assert not self.locks.held

    @invariant()
    def one_lock_per_pin_within_the_budget(self):
        pinned = [s for s in range(1, 5) if s in self.book]
        assert self.locks.nodes() == [f"node{s}" for s in pinned]
        assert self.book.num_tokens <= BUDGET
        assert self.book.fits(0)


TestPinning = Pinning.TestCase
TestPinning.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
