"""Half-open intervals: respelling, cutting and runs, each against a token-by-token count."""

from array import array

from hypothesis import given
from hypothesis import strategies as st
from msgspec import to_builtins

from kvedit.reason import Reason
from kvedit.splice.spans import Piece, Plan, Refusal, cut, next_start, overlap, run_end, served_ids
from kvedit.splice.virtual_ids import is_virtual, segment_of
from tests.unit.spans_of import span, whole

NUM_TOKENS = 40


@st.composite
def piece_lists(draw):
    edges = sorted(draw(st.sets(st.integers(1, NUM_TOKENS), max_size=6)))
    pairs = zip(edges, edges[1:], strict=False)
    return whole(*(span(a, b, n + 1) for n, (a, b) in enumerate(pairs) if draw(st.booleans())))


def composed_positions(pieces):
    return {i for p in pieces for i in range(p.start, p.stop)}


@given(piece_lists(), st.integers(0, NUM_TOKENS + 5))
def test_served_ids_replace_exactly_the_composed_tokens(pieces, length):
    real = array("q", range(1000, 1000 + length))
    served = served_ids(real, pieces)
    assert len(served) == length
    inside = composed_positions(pieces)
    for position, (before, after) in enumerate(zip(real, served, strict=True)):
        assert is_virtual(after) == (position in inside)
        if position not in inside:
            assert after == before
    assert real == array("q", range(1000, 1000 + length)), "the caller's array is not touched"


def test_a_virtual_id_is_the_same_wherever_the_segment_stands():
    """A repeat of the skill at another offset spells the same ids: index in the segment."""
    near, far = span(5, 9, 3, seam=2), span(25, 29, 3, seam=2)
    assert near.ids(5, 9) == far.ids(25, 29)
    assert [segment_of(i) for i in near.ids(5, 9)] == [(3, i) for i in range(2, 6)]


@given(piece_lists(), st.integers(0, NUM_TOKENS + 5))
def test_cut_keeps_what_stands_in_front(pieces, position):
    kept = cut(pieces, position)
    assert composed_positions(kept) == {i for i in composed_positions(pieces) if i < position}
    assert all(p.start < p.stop for p in kept), "no empty piece"
    assert cut(kept, position) == kept


@given(piece_lists(), st.integers(0, NUM_TOKENS))
def test_run_end_is_the_first_real_token(pieces, position):
    inside = composed_positions(pieces)
    expected = position
    while expected in inside:
        expected += 1
    assert run_end(pieces, position) == expected


@given(piece_lists(), st.integers(0, NUM_TOKENS))
def test_next_start_and_overlap(pieces, position):
    starts = [p.start for p in pieces if p.start > position]
    assert next_start(pieces, position) == (starts[0] if starts else None)
    inside = composed_positions(pieces)
    assert overlap(pieces, position, NUM_TOKENS) == len(inside & set(range(position, NUM_TOKENS)))


def test_the_shift_counts_from_behind_the_compile_prefix():
    """Prompt position 100 is token 16 of a segment compiled behind a BOS: its donor token stands
    at 17, its shift is 83."""
    s = span(100, 150, seam=16, prefix_len=1)
    assert (s.seam, s.delta_pos) == (16, 83)
    low, high = s.donor_interval(100, 150)
    assert (low, high) == (17, 67)
    assert 100 - low == s.delta_pos
    assert to_builtins(s.to_report()) == {
        "skill": "skill1",
        "start": 100,
        "stop": 150,
        "seam": 16,
        "delta": 83,
    }


def test_a_piece_of_a_span_reads_its_own_part_of_the_donor():
    s = span(100, 150, seam=16)
    piece = Piece(s, 120, 130)
    assert s.donor_interval(piece.start, piece.stop) == (36, 46)


def test_alternatives_leave_out_what_is_empty():
    spans, history = (span(5, 9),), (span(5, 9, 2),)
    assert Plan(num_tokens=20, registry_version=1).alternatives == ()
    assert Plan(num_tokens=20, registry_version=1, history=history).alternatives == (history,)
    both = Plan(num_tokens=20, registry_version=1, spans=spans, history=history)
    assert both.alternatives == (spans, history)


def test_a_refusal_reports_its_detail_as_fields():
    refusal = Refusal(
        skill="policy", reason=Reason.DIFFERS_AT, detail=(("index", 3), ("position", 9))
    )
    assert to_builtins(refusal.to_report()) == {
        "skill": "policy",
        "reason": "differs_at",
        "index": 3,
        "position": 9,
    }
