"""Token classes: every prompt token gets one, once, whatever admissions and chunks do."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvedit.reason import Reason
from kvedit.splice.spans import Refusal, cut, run_end
from kvedit.splice.token_classes import COUNTS, TokenSplit, joined, without_values
from tests.unit.spans_of import span, whole

SPANS = (span(10, 30, 1, seam=4), span(30, 40, 2), span(55, 70, 3, seam=5))
PIECES = whole(*SPANS)
NUM_TOKENS = 80


def classes(split):
    return split.exact, split.composed, split.derived, split.computed


def test_one_admission_with_a_splice():
    split = TokenSplit(NUM_TOKENS)
    split.cover(PIECES, prefix_len=70, extend_end=80, copied=[(10, 40), (55, 70)])
    assert classes(split) == (10, 20 + 10 + 15, 15, 10)
    assert (split.copied, split.repaired) == (45, 0)
    assert [s.start for s in split.to_report().spans] == [10, 30, 55]


def test_chunks_between_spans():
    """(forward to 10) splice (forward 40..55) splice (forward 70..80)"""
    split = TokenSplit(NUM_TOKENS)
    split.cover(PIECES, prefix_len=0, extend_end=10)
    split.cover(PIECES, prefix_len=40, extend_end=55, copied=[(10, 40)])
    split.cover(PIECES, prefix_len=70, extend_end=80, copied=[(10, 40), (55, 70)])
    assert classes(split) == (0, 45, 0, 10 + 15 + 10)
    assert (split.copied, split.repaired) == (45, 4 + 5)


def test_a_hit_counts_no_copy():
    split = TokenSplit(NUM_TOKENS)
    split.cover(PIECES, prefix_len=70, extend_end=80)
    assert (split.composed, split.copied) == (45, 0)


def test_a_later_admission_revises_nothing():
    """Retraction: the request comes back and finds other things in the cache."""
    split = TokenSplit(NUM_TOKENS)
    split.cover(PIECES, prefix_len=40, extend_end=80, copied=[(10, 40)])
    first = split.to_report()
    split.cover(PIECES, prefix_len=79, extend_end=85)
    split.cover((), prefix_len=0, extend_end=85)
    assert split.to_report() == first


def test_tokens_behind_a_given_up_splice_are_computed():
    split = TokenSplit(NUM_TOKENS)
    split.cover(PIECES, prefix_len=0, extend_end=10)
    split.cover(cut(PIECES, 10), prefix_len=10, extend_end=80)
    assert classes(split) == (0, 0, 0, 80)
    assert split.to_report().spans == []


def test_output_tokens_have_no_class():
    split = TokenSplit(NUM_TOKENS)
    split.cover((), prefix_len=100, extend_end=120)
    assert classes(split) == (NUM_TOKENS, 0, 0, 0)


def test_a_refusal_is_reported_once():
    split = TokenSplit(NUM_TOKENS)
    split.refuse([Refusal(skill="a", reason=Reason.EVICTED)])
    split.refuse(
        [Refusal(skill="a", reason=Reason.EVICTED), Refusal(skill="a", reason=Reason.NO_SLOTS)]
    )
    assert [r.reason for r in split.to_report().refused] == ["evicted", "no_slots"]


steps = st.lists(st.tuples(st.integers(0, 90), st.integers(0, 90)), min_size=1, max_size=8)


@settings(max_examples=300)
@given(steps, st.integers(0, NUM_TOKENS))
def test_classes_always_add_up_to_what_is_covered(admissions, given_up_at):
    """Any order of admissions, overlapping or not; a splice may be given up half-way."""
    pieces = cut(PIECES, given_up_at)
    split = TokenSplit(NUM_TOKENS)
    for prefix_len, num_forwarded in admissions:
        split.cover(pieces, prefix_len=prefix_len, extend_end=prefix_len + num_forwarded)
        assert sum(classes(split)) == split.covered <= NUM_TOKENS
    end = max(p + n for p, n in admissions)
    assert split.covered == min(end, NUM_TOKENS)
    assert split.repaired <= split.computed


@given(st.integers(1, 30))
def test_every_chunk_length_gives_the_same_classes_of_a_fresh_splice(chunk):
    """Copied tokens stay copied and the rest is computed, however the gaps are cut."""
    split, at, copied = TokenSplit(NUM_TOKENS), 0, []
    while at < NUM_TOKENS:
        jump = run_end(PIECES, at)
        if jump > at:
            copied.append((at, jump))
            at = jump
        gap_end = next((p.start for p in PIECES if p.start > at), NUM_TOKENS)
        end = min(at + chunk, gap_end)
        split.cover(PIECES, prefix_len=at, extend_end=end, copied=copied)
        at = end
    assert classes(split) == (0, 45, 0, 35)
    assert (split.copied, split.repaired) == (45, 9)


def report_with(computed: int, **fields: object) -> dict[str, object]:
    counts = dict.fromkeys(COUNTS, 0)
    return {**counts, "exact": 1, "computed": computed, "spans": [], "refused": [], **fields}


def test_one_report_of_several_prompts_adds_up_and_holds_each() -> None:
    one, two = report_with(3), report_with(4)
    assert joined([one]) is one
    both = joined([one, two])
    assert (both["exact"], both["computed"]) == (2, 7)
    assert both["prompts"] == [one, two] and "spans" not in both


def test_a_report_without_values_keeps_places_and_counts() -> None:
    line = {"field": "f", "start": 3, "stop": 5}
    full = report_with(2, errata=[{**line, "text": "secret"}], conversation="token")
    bare = report_with(2, errata=[line])
    assert without_values(full) == bare
    assert without_values(joined([full, full]))["prompts"] == [bare, bare]
    assert full["errata"] == [{**line, "text": "secret"}], "the client's own report stays"
