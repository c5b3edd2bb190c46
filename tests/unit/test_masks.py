"""Masked ids: a changed value moves nothing, anything else does."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from kvedit.edit.masked import Masked, common_prefix, prefix_hashes
from kvedit.edit.served_path import Window

IDS = array("q", range(100, 120))
lists = st.lists(st.integers(-3, 3), max_size=12).map(lambda ids: array("q", ids))


def window(start, stop, number=1, around="\0"):
    return Window(number=number, start=start, stop=stop, value="v", around=around)


def test_a_value_of_another_length_gives_the_same_masked_ids():
    short = Masked(IDS, (window(4, 5), window(9, 12, 2)))
    longer = IDS[:4] + array("q", [7, 7, 7]) + IDS[5:9] + array("q", [8]) + IDS[12:]
    assert Masked(longer, (window(4, 7), window(11, 12, 2))).ids == short.ids


def test_another_field_or_other_text_around_the_value_is_not_the_same():
    plain = Masked(IDS, (window(4, 5),)).ids
    assert Masked(IDS, (window(4, 5, number=2),)).ids != plain
    assert Masked(IDS, (window(4, 5, around=" \0"),)).ids != plain
    assert plain[4] < 0, "no token id equals a marker"


def test_positions_outside_windows_map_there_and_back():
    masked = Masked(IDS, (window(0, 3), window(3, 4, 2), window(10, 15, 3)))
    inside = {1, 2, *range(11, 15)}
    for position in set(range(len(IDS) + 1)) - inside:
        there = masked.to_masked(position)
        assert masked.to_real(there) == position
        if position < len(IDS) and position not in (0, 3, 10):
            assert masked.ids[there] == IDS[position]
    assert masked.to_masked(len(IDS)) == len(masked.ids)


@given(lists, lists)
def test_hashes_of_equal_prefixes_are_equal(left, right):
    shared = common_prefix(left, right)
    assert left[:shared] == right[:shared]
    assert shared == min(len(left), len(right)) or left[shared] != right[shared]
    both = zip(prefix_hashes(left), prefix_hashes(right), strict=False)
    equal = [int(a) == int(b) for a, b in both]
    assert equal == [i <= shared for i in range(len(equal))]
