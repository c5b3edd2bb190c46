"""Client quotas: each limit on its own, all reasons at once, and no growth without bound."""

import pytest

from kvedit.errors import QuotaExceeded
from kvedit.skills.quota import QuotaBook


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def book(clock, max_skills=2, max_tokens=100, rate_per_minute=100):
    return QuotaBook(
        max_skills=max_skills, max_tokens=max_tokens, rate_per_minute=rate_per_minute, clock=clock
    )


def test_count(clock):
    quota = book(clock)
    quota.admit("ns", "a", 1)
    quota.admit("ns", "b", 1)
    with pytest.raises(QuotaExceeded, match="skills: expected at most 2, got 3") as refused:
        quota.admit("ns", "c", 1)
    assert refused.value.status == 429
    quota.admit("other", "c", 1)
    quota.release("ns", "a")
    quota.admit("ns", "c", 1)


def test_tokens_count_the_new_content_of_a_name_once(clock):
    quota = book(clock)
    quota.admit("ns", "a", 60)
    quota.admit("ns", "a", 100)
    with pytest.raises(QuotaExceeded, match="tokens: expected at most 100, got 101"):
        quota.admit("ns", "b", 1)
    assert quota.held("ns") == {"a": 100}


def test_rate_is_a_sliding_minute_that_refusals_do_not_extend(clock):
    quota = book(clock, rate_per_minute=2)
    for clock.now in (0.0, 30.0):
        quota.admit("ns", "a", 1)
    clock.now = 59.9
    with pytest.raises(QuotaExceeded, match="rate: expected at most 2 registrations per minute"):
        quota.admit("ns", "a", 1)
    clock.now = 60.0
    quota.admit("ns", "a", 1)
    clock.now = 89.9
    with pytest.raises(QuotaExceeded, match="rate"):
        quota.admit("ns", "a", 1)


def test_all_reasons_come_at_once_and_nothing_is_reserved(clock):
    quota = book(clock, max_skills=0, max_tokens=0, rate_per_minute=0)
    with pytest.raises(QuotaExceeded, match="skills: .*; tokens: .*; rate: "):
        quota.admit("ns", "a", 1)
    assert quota.held("ns") == {}


def test_cancel_gives_back_what_was_there_before(clock):
    quota = book(clock)
    quota.cancel(quota.admit("ns", "a", 10))
    assert quota.held("ns") == {}
    quota.admit("ns", "a", 10)
    quota.cancel(quota.admit("ns", "a", 90))
    assert quota.held("ns") == {"a": 10}


def test_invented_namespaces_are_forgotten(clock):
    quota = book(clock)
    for i in range(50):
        quota.admit(f"ns{i}", "a", 1)
        quota.release(f"ns{i}", "a")
    clock.now = 61.0
    quota.admit("ns", "a", 1)
    assert list(quota._accounts) == ["ns"]
    quota.release("never seen", "a")
