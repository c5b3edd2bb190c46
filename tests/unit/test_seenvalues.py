"""Public values: the newest few of each field, apart by namespace."""

from __future__ import annotations

from kvedit.fields.public_values import MAX_FIELDS, MAX_VALUES, SeenValues


def test_the_newest_come_first_and_once():
    seen = SeenValues()
    for value in ("a", "b", "a"):
        seen.add("ns", 1, value)
    assert seen.of("ns", 1) == ("a", "b")
    assert seen.of("other", 1) == seen.of("ns", 2) == (), "values stay in their namespace and field"


def test_old_values_and_old_fields_are_forgotten():
    seen = SeenValues()
    for number in range(MAX_FIELDS + 1):
        for value in range(MAX_VALUES + 2):
            seen.add("ns", number, str(value))
    assert seen.of("ns", 0) == ()
    assert seen.of("ns", 1) == ("5", "4", "3", "2")
    seen.clear()
    assert seen.of("ns", 1) == ()
