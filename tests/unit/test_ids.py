"""Virtual ids: spelled and read back, never a vocabulary's, never shared by two tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvedit.splice.virtual_ids import (
    MAX_SEGMENT_NUMBER,
    MAX_SEGMENT_TOKENS,
    VIRTUAL_BIT,
    is_virtual,
    segment_of,
    virtual_ids,
)

numbers = st.integers(1, MAX_SEGMENT_NUMBER)


@given(numbers, st.integers(0, MAX_SEGMENT_TOKENS), st.integers(0, 50))
def test_every_id_names_its_segment_and_index(number, start, length):
    stop = min(start + length, MAX_SEGMENT_TOKENS)
    ids = virtual_ids(number, start, stop)
    assert [segment_of(i) for i in ids] == [(number, index) for index in range(start, stop)]
    assert all(is_virtual(i) and i < 2**63 for i in ids)
    assert ids.typecode == "q"


@given(numbers, numbers, st.integers(0, MAX_SEGMENT_TOKENS - 1))
def test_two_segments_never_share_an_id(first, second, index):
    [a], [b] = virtual_ids(first, index, index + 1), virtual_ids(second, index, index + 1)
    assert (a == b) == (first == second)


def test_neighbouring_segments_do_not_run_into_each_other():
    [last] = virtual_ids(7, MAX_SEGMENT_TOKENS - 1, MAX_SEGMENT_TOKENS)
    [first] = virtual_ids(8, 0, 1)
    assert first == last + 1, "the ranges are adjacent: one more bit of index would overlap"


@pytest.mark.parametrize("token_id", [0, 1, 151_935, 2**32, VIRTUAL_BIT - 1])
def test_no_vocabulary_id_is_virtual(token_id):
    assert not is_virtual(token_id)


@pytest.mark.parametrize(
    ("number", "start", "stop"),
    [
        (0, 0, 1),
        (-1, 0, 1),
        (MAX_SEGMENT_NUMBER + 1, 0, 1),
        (1, -1, 1),
        (1, 2, 1),
        (1, 0, MAX_SEGMENT_TOKENS + 1),
    ],
)
def test_what_cannot_be_spelled_is_refused(number, start, stop):
    with pytest.raises(ValueError, match="kvedit: (segment|token range): expected"):
        virtual_ids(number, start, stop)
