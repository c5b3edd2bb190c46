"""Edited paths: what is copied, from where, and what is computed anew."""

from __future__ import annotations

import dataclasses
from array import array

from kvedit.edit.served_path import (
    EDIT,
    Cut,
    Line,
    New,
    ServedPath,
    Window,
    edit,
    fit_to_pages,
    kept_spans,
)
from kvedit.splice.sources import FIRST_PATH_NUMBER, PathSource
from kvedit.splice.spans import Piece
from tests.unit.spans_of import span, whole

IDS = array("q", range(1000, 1100))
DONOR = FIRST_PATH_NUMBER + 77


def window(number, start, stop, value="old"):
    return Window(number=number, start=start, stop=stop, value=value, around="\0")


def path(*pieces, windows=(), lines=()):
    return ServedPath(ids=IDS, pieces=pieces, windows=windows, lines=lines)


def edited(base, new, **limits):
    fields = {
        "donor": PathSource(DONOR),
        "donor_stop": 100,
        "page_size": 1,
        "min_span_tokens": 4,
    } | limits
    texts = {n: New(array("q", [-1] * length), "new") for n, length in new.items()}
    return edit(base, texts, Cut(**fields))


def taken(spans):
    """(start, stop, source's number, donor's start) of each span."""
    return [(s.start, s.stop, s.source.number, s.donor_interval(s.start, s.stop)[0]) for s in spans]


def test_what_follows_a_longer_value_is_shifted():
    base = path(windows=(window(1, 10, 12), window(2, 40, 41)), lines=(a_line(60, 70),))
    made, spans = edited(base, {1: 5})
    assert made.ids == IDS[:10] + array("q", [-1] * 5) + IDS[12:]
    assert taken(spans) == [(15, 103, DONOR, 12)]
    assert [(w.start, w.stop, w.value) for w in made.windows] == [(10, 15, "new"), (43, 44, "old")]
    assert [(x.start, x.stop) for x in made.lines] == [(63, 73)]


def test_two_fields_at_once_have_a_shift_each():
    base = path(windows=(window(1, 10, 14), window(2, 50, 51)))
    _, spans = edited(base, {1: 1, 2: 9})
    assert taken(spans) == [(11, 47, DONOR, 14), (56, 105, DONOR, 51)]


def test_a_composed_part_is_taken_from_its_own_segment_never_from_its_copy():
    skill = span(30, 50, segment=3, seam=4)
    base = path(Piece(skill, 34, 50), windows=(window(1, 10, 12),))
    _, spans = edited(base, {1: 3})
    own = skill.donor_interval(34, 50)[0]
    assert taken(spans) == [(13, 35, DONOR, 12), (35, 51, 3, own), (51, 101, DONOR, 50)]


def test_a_composed_part_in_front_of_the_field_stays_as_it_is():
    base = path(*whole(span(2, 9, 3)), windows=(window(1, 10, 12),))
    _, spans = edited(base, {1: 2})
    assert taken(spans)[0] == (2, 9, 3, 0)


def test_repair_topk_and_what_the_tree_can_hold_are_left_out():
    base = path(windows=(window(1, 10, 12),))
    assert taken(edited(base, {1: 2}, repair=3)[1]) == [(15, 100, DONOR, 15)]
    assert taken(edited(base, {1: 2}, topk=8)[1]) == [(12, 92, DONOR, 12)]
    assert taken(edited(base, {1: 2}, donor_stop=64)[1]) == [(12, 64, DONOR, 12)]
    assert edited(base, {1: 2}, donor_stop=15)[1] == (), "shorter than a span is worth"


def test_every_span_keeps_to_pages_though_its_neighbour_may_be_lost():
    skill = span(30, 50, segment=3)
    base = path(*whole(skill), windows=(window(1, 10, 12),))
    _, spans = edited(base, {1: 3}, page_size=8, donor_stop=96)
    assert [(s.start, s.stop) for s in spans] == [(16, 24), (32, 48), (56, 96)]


def test_short_runs_are_left_out_and_unbroken_ones_count_together():
    spans = (span(0, 3, 1), span(3, 6, 2), span(10, 13, 3))
    assert list(fit_to_pages(spans, page_size=1, min_span_tokens=5)) == list(spans[:2])


def test_a_path_up_to_a_position_has_what_ends_before_it():
    base = path(*whole(span(20, 30)), windows=(window(1, 5, 6), window(2, 24, 26)))
    part = base.upto(25)
    assert (part.ids, [w.number for w in part.windows]) == (IDS[:25], [1])
    assert taken(kept_spans(part)) == [(20, 25, 1, 0)]


def test_notes_stay_while_something_stands_that_was_computed_under_them():
    notes = {1: frozenset({"old"})}

    def kept(*pieces):
        base = ServedPath(ids=IDS, pieces=pieces, windows=(window(1, 10, 12, "new"),), notes=notes)
        return dict(base.with_live_notes().notes)

    memory = span(20, 60, 5, seam=16)  # its segment holds the window
    other = span(20, 60, 6, seam=4)
    assert kept(*whole(memory)) == notes
    assert kept(*whole(other)) == {} == kept()
    assert kept(*whole(dataclasses.replace(other, skill=EDIT))) == notes
    assert kept(Piece(memory, 8, 12)) == {}, "nothing of it stands behind the window"


def test_an_edit_that_keeps_only_parts_of_a_memory_keeps_its_note():
    memory = span(4, 60, 5)
    base = path(*whole(memory), windows=(window(1, 10, 12),))
    made, spans = edited(base, {1: 3}, repair=8, topk=60)
    assert [s.source.number for s in spans if s.start > 13] == [5]
    pieces = tuple(Piece(s, s.start, s.stop) for s in spans)
    assert dataclasses.replace(made, pieces=pieces).with_live_notes().notes == {1: {"old"}}


def test_a_line_says_more_than_the_window_and_a_later_line_more_than_an_earlier():
    base = path(windows=(window(1, 5, 6), window(2, 8, 9)), lines=(a_line(40, 50, "b"),))
    assert base.says() == {1: "b", 2: "old"}
    later = path(windows=base.windows, lines=(*base.lines, a_line(60, 70, "c")))
    assert later.says() == {1: "c", 2: "old"}


def a_line(start, stop, value="new"):
    return Line(number=1, start=start, stop=stop, value=value)
