"""Numbers of donor paths: one path one number, and none twice."""

from __future__ import annotations

from array import array

import pytest

from kvedit.edit import donor_paths
from kvedit.edit.donor_paths import PathBook
from kvedit.splice.sources import FIRST_PATH_NUMBER
from kvedit.splice.virtual_ids import MAX_SEGMENT_NUMBER, virtual_ids

KEY = (None, None)


def ids(*tokens):
    return array("q", tokens)


def test_a_path_that_goes_on_keeps_its_number_and_a_prefix_has_it_too():
    book = PathBook()
    number = book.number_of(KEY, ids(1, 2, 3))
    assert FIRST_PATH_NUMBER <= number <= MAX_SEGMENT_NUMBER
    assert virtual_ids(number, 0, 3)
    assert book.number_of(KEY, ids(1, 2, 3, 4)) == number
    assert book.number_of(KEY, ids(1, 2)) == number
    assert book.by_number(number).ids == ids(1, 2, 3, 4), "a prefix does not shorten it"


def test_another_token_or_another_tree_is_another_path():
    book = PathBook()
    first = book.number_of(KEY, ids(1, 2, 3))
    others = [
        book.number_of(KEY, ids(1, 2, 9, 4)),
        book.number_of(KEY, ids(9, 2, 3)),
        book.number_of((None, "salt"), ids(1, 2, 3)),
    ]
    assert len({first, *others}) == 4
    assert book.by_number(first).ids == ids(1, 2, 3)


def test_a_number_is_never_used_again():
    """Copies spelled with it may still be in the tree."""
    book = PathBook()
    number = book.number_of(KEY, ids(1, 2))
    book.drop(number)
    again = book.number_of(KEY, ids(1, 2))
    book.clear()
    assert len({number, again, book.number_of(KEY, ids(1, 2))}) == 3


@pytest.mark.parametrize("limit, value", [("MAX_PATHS", 2), ("MAX_TOKENS", 7)])
def test_the_least_recently_used_path_goes_first(monkeypatch, limit, value):
    monkeypatch.setattr(donor_paths, limit, value)
    book = PathBook()
    first, second = (book.number_of(KEY, ids(i, 2, 3)) for i in (1, 2))
    book.number_of(KEY, ids(1, 2))
    third = book.number_of(KEY, ids(3, 2))
    assert book.by_number(second) is None
    assert book.by_number(first) is not None and book.by_number(third) is not None
    assert len(book) == 2
