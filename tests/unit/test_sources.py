"""Skills and paths share one number space, and no number is of both."""

from __future__ import annotations

from array import array

import pytest

from kvedit.edit.donor_paths import PathBook
from kvedit.splice.sources import FIRST_PATH_NUMBER, PathSource, SkillSource, in_order
from kvedit.splice.virtual_ids import MAX_SEGMENT_NUMBER

LAST_SKILL = FIRST_PATH_NUMBER - 1


@pytest.mark.parametrize("number", [1, LAST_SKILL])
def test_a_skill_has_a_number_of_the_lower_half(number: int) -> None:
    assert SkillSource(number).number == number
    with pytest.raises(ValueError, match="source: expected a number in"):
        PathSource(number)


@pytest.mark.parametrize("number", [FIRST_PATH_NUMBER, MAX_SEGMENT_NUMBER])
def test_a_path_has_a_number_of_the_upper_half(number: int) -> None:
    assert PathSource(number).number == number
    with pytest.raises(ValueError, match="source: expected a number in"):
        SkillSource(number)


@pytest.mark.parametrize("number", [0, -1, MAX_SEGMENT_NUMBER + 1])
def test_what_no_virtual_id_can_spell_is_neither(number: int) -> None:
    for kind in (SkillSource, PathSource):
        with pytest.raises(ValueError, match="source: expected a number in"):
            kind(number)


def test_the_book_of_paths_numbers_paths() -> None:
    assert PathSource(PathBook().number_of((None, None), array("q", [1, 2])))


def test_ranks_go_through_sources_in_one_order() -> None:
    sources = [PathSource(MAX_SEGMENT_NUMBER), SkillSource(2), SkillSource(1)]
    assert in_order(frozenset(sources)) == sources[::-1]
