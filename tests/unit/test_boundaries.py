"""Runs behind forced chunk boundaries pay for them, or are computed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec import to_builtins

from kvedit.splice.pass_price import MAX_BOUNDARIES, afford
from kvedit.splice.spans import overlap
from tests.unit.spans_of import span, whole


def test_the_run_at_the_cached_prefix_is_free_and_the_others_pay():
    spans = span(10, 26, 1), span(40, 56, 2), span(70, 134, 3)
    afforded = afford(whole(*spans), 10, 20)
    assert afforded.pieces == whole(spans[0], spans[2])
    assert afforded.num_boundaries == 1
    ((source, refusal),) = afforded.lost
    assert source.number == 2
    assert to_builtins(refusal.to_report()) == {
        "skill": "skill2",
        "reason": "not_worth_a_pass",
        "num_tokens": 16,
        "limit": 20,
    }


def test_a_run_in_which_the_cached_prefix_ends_is_free():
    spans = span(10, 26, 1), span(26, 30, 2)
    assert afford(whole(*spans), 12, 1000).pieces == whole(*spans)
    assert afford(whole(*spans), 30, 1000).pieces == whole(*spans)  # cached paths stay as they are


def test_adjacent_spans_pay_together():
    spans = span(10, 26, 1), span(26, 42, 2), span(50, 66, 3)
    afforded = afford(whole(*spans), 0, 31)
    assert afforded.pieces == whole(*spans[:2])
    assert afforded.num_boundaries == 1


def test_the_longest_runs_are_kept_and_of_equals_the_first():
    lengths = [20] * 10 + [30] * 10
    spans = [span(100 * i, 100 * i + n, i) for i, n in enumerate(lengths, 1)]
    afforded = afford(whole(*spans), 0, 1)
    assert afforded.num_boundaries == MAX_BOUNDARIES
    assert afforded.pieces == whole(*spans[:6], *spans[10:])
    assert {refusal.reason for _, refusal in afforded.lost} == {"too_many_runs"}


def test_a_skill_is_refused_once_with_its_longest_run():
    spans = [span(300 * i, 300 * i + i, 7) for i in range(1, 200)]
    afforded = afford(whole(*spans), 0, 400)
    assert [refusal.detail for _, refusal in afforded.lost] == [
        (("num_tokens", 199), ("limit", 400))
    ]


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 60)), max_size=60),
    st.integers(0, 1500),
    st.integers(0, 50),
)
def test_whatever_is_kept_is_free_or_pays(gaps_and_lengths, matched, price):
    spans, at = [], 0
    for number, (gap, length) in enumerate(gaps_and_lengths, 1):
        spans.append(span(at + gap, at + gap + length, number))
        at += gap + length
    pieces = whole(*spans)
    afforded = afford(pieces, matched, price)
    ahead = [p for p in afforded.pieces if p.start > matched]
    starts = {p.start for p in ahead} - {p.stop for p in afforded.pieces}
    assert len(starts) == afforded.num_boundaries <= MAX_BOUNDARIES
    assert overlap(afforded.pieces, 0, matched) == overlap(pieces, 0, matched)
    assert {p.span.source for p in pieces} - {p.span.source for p in afforded.pieces} == {
        source for source, _ in afforded.lost
    }
