"""Whose turn it was: entries serve their own conversation and nobody else's."""

from __future__ import annotations

import dataclasses
from array import array

import pytest

from kvedit.edit import ledger as module
from kvedit.edit import replies, rivals
from kvedit.edit.ledger import MAX_PER_PLACE, Entry, Ledger
from kvedit.edit.masked import Masked
from kvedit.edit.proofs import Claim
from kvedit.edit.served_path import ServedPath, Window

SCOPE = ("ns", "")
OPENING = array("q", range(100, 120))
SUFFIX = array("q", [1, 2])
LONG = array("q", range(500, 540))
HELLO = array("q", [7, 8, 9])
MARKS = frozenset({30})  # ends a message


def text_of(ids):
    return " ".join(str(i) for i in ids).encode()


def entry(lineage, reply=LONG, *, masked=OPENING, says=0, depth=0):
    """A turn whose served text differs in its first token: what it ``says``."""
    ids = array("q", [says]) + masked[1:] + SUFFIX
    return Entry(
        masked=masked,
        path=ServedPath(ids=ids + reply[:-1]),
        anchor=len(masked),
        lines_end=len(masked),
        reply_start=len(ids),
        lineage=lineage,
        depth=depth,
        reply=reply,
    )


def found(ledger, ids, *, public=False, limit=10**6, **claim):
    claim = Claim(**{"scope": SCOPE, "by_reply": True} | claim)
    return ledger.find(claim, Masked(ids, ()), limit, public=public, text_of=text_of, marks=MARKS)


def behind(reply, masked=OPENING):
    """A client's prompt that goes on with ``reply``."""
    return masked + SUFFIX + reply + array("q", [30, 31])


def ledger_of(*entries, scope=SCOPE):
    ledger = Ledger()
    for one in entries:
        ledger.record(scope, one)
    return ledger


def test_a_request_that_goes_on_with_the_reply_is_of_the_conversation():
    mine = entry(1)
    got = found(ledger_of(mine), behind(LONG))
    assert (got.entries, got.length, got.lineage, got.depth) == ((mine,), len(OPENING), 1, 1)


def test_a_first_turn_is_no_base_for_one_that_reads_the_same():
    assert found(ledger_of(entry(1)), OPENING + SUFFIX).reason == "not_proven"


def test_almost_the_whole_reply_must_come_back():
    """Greedy answers to look-alike questions begin alike and differ where the value stands."""
    other = LONG[:20] + array("q", [-5]) + LONG[21:]
    assert found(ledger_of(entry(1)), behind(other)).entries == ()
    stop_text_cut_off, mine = LONG[: -replies.TAIL_TOKENS], entry(1)
    trimmed = ledger_of(dataclasses.replace(mine, is_trimmed=True))
    assert len(found(trimmed, behind(stop_text_cut_off)).entries) == 1
    assert found(ledger_of(entry(1, HELLO)), behind(HELLO[:2])).entries == ()


def test_a_reply_that_was_tokenised_otherwise_is_known_by_its_text():
    ledger = ledger_of(entry(1, HELLO))
    got = ledger.find(
        Claim(scope=SCOPE, by_reply=True),
        Masked(behind(array("q", [78, 9])), ()),
        10**6,
        public=False,
        text_of=lambda ids: "".join(str(i) for i in ids).encode(),
        marks=MARKS,
    )
    assert len(got.entries) == 1


def test_a_reply_that_only_begins_alike_is_another_one():
    """A look-alike with a longer answer goes on with its own, which begins with the shorter."""
    ledger = ledger_of(entry(1, HELLO))
    longer = HELLO + array("q", [55])
    assert len(found(ledger, behind(HELLO)).entries) == 1
    assert found(ledger, behind(longer)).entries == ()
    assert len(found(ledger, behind(longer)[:-2]).entries) == 1, "raw text has no end of a message"


def test_a_reply_that_was_shown_in_part_is_known_by_that_part():
    cut = LONG[: -replies.TAIL_TOKENS + 1]
    whole, trimmed = entry(1, LONG), dataclasses.replace(entry(1, LONG), is_trimmed=True)
    assert found(ledger_of(whole), behind(cut)).entries == ()
    assert len(found(ledger_of(trimmed), behind(cut)).entries) == 1
    assert found(ledger_of(trimmed), behind(LONG + array("q", [55]))).entries == ()


def test_an_aborted_turn_proves_nothing():
    assert found(ledger_of(entry(1, array("q"))), behind(array("q"))).entries == ()


def test_look_alikes_with_the_same_reply_are_ambiguous_unless_served_the_same():
    differ = ledger_of(entry(1, says=1), entry(2, says=2))
    assert found(differ, behind(LONG)).reason == "not_proven"
    alike = found(ledger_of(entry(1), entry(2)), behind(LONG))
    assert len(alike.entries) == 2
    assert alike.lineage is None, "nobody knows which of the two goes on"


def test_a_longer_turn_of_a_look_alike_is_not_taken_for_ones_own():
    """One conversation is two turns old when its look-alike, given the same first reply, asks the
    same second question."""
    second = behind(LONG)
    first_of_one, second_of_one = entry(1, says=1), entry(1, HELLO, masked=second, says=1, depth=1)
    regenerated = second + SUFFIX
    alone = ledger_of(first_of_one, second_of_one)
    assert found(alone, regenerated).entries == (second_of_one,), "its own second turn again"
    both = ledger_of(first_of_one, second_of_one, entry(2, says=2))
    assert found(both, regenerated).reason == "not_proven"
    parted = ledger_of(first_of_one, second_of_one, entry(2, says=1))
    assert second_of_one not in found(parted, regenerated).entries
    assert found(ledger_of(second_of_one), regenerated).entries == (), "no first reply to tell by"


@pytest.mark.parametrize("forget", ["crowd", "age", "clear"])
def test_a_look_alike_that_was_forgotten_still_counts(monkeypatch, forget):
    """Else the one that is left would seem to be the only one."""
    ledger = ledger_of(entry(1, says=1))
    if forget == "crowd":
        for _ in range(MAX_PER_PLACE):
            ledger.record(SCOPE, entry(ledger.new_lineage() + 1, says=2))
    elif forget == "age":
        monkeypatch.setattr(module, "MAX_ENTRIES", 1)
        ledger.record(SCOPE, entry(2, says=2))
    else:
        ledger.clear()
        assert len(ledger) == 0
        ledger.record(SCOPE, entry(2, says=2))
    assert found(ledger, behind(LONG)).reason == "not_proven"
    ledger.record(SCOPE, entry(3, HELLO, says=3))
    assert len(found(ledger, behind(HELLO)).entries) == 1, "another reply, another conversation"


def test_a_look_alike_that_was_served_without_edits_counts_too():
    ledger = ledger_of(entry(1, says=1))
    ledger.note_rival("ns", entry(2, says=1))
    assert len(found(ledger, behind(LONG)).entries) == 1, "the same text shows nothing"
    ledger.note_rival("ns", entry(3, HELLO, says=2))
    assert len(found(ledger, behind(LONG)).entries) == 1, "another reply"
    ledger.note_rival("ns", entry(4, says=2))
    assert found(ledger, behind(LONG)).reason == "not_proven"
    assert len(ledger) == 1, "no base of anything"


@pytest.mark.parametrize("theirs", ["", "chat", "token"])
@pytest.mark.parametrize("mine", ["", "chat", "other"])
@pytest.mark.parametrize("fate", ["kept", "forgotten", "no base"])
def test_a_look_alike_counts_whatever_name_it_was_sent_under(mine, theirs, fate):
    """Its client may leave the name out the next time, add one or change it."""
    scope = ("ns", mine)
    ledger = ledger_of(*[entry(2, says=2)] * (fate == "forgotten"), scope=("ns", theirs))
    ledger.clear()
    ledger.record(scope, entry(1, says=1))
    ledger.record(("ns2", theirs), entry(2, says=2))
    ledger.record(("ns", theirs), entry(3, HELLO, says=2))
    if fate == "kept":
        assert len(found(ledger, behind(LONG), scope=scope).entries) == 1
        ledger.record(("ns", theirs), entry(2, says=2))
    elif fate == "no base":
        assert len(found(ledger, behind(LONG), scope=scope).entries) == 1
        ledger.note_rival("ns", entry(2, says=2))
    assert found(ledger, behind(LONG), scope=scope).reason == "not_proven"
    assert found(ledger, OPENING, scope=scope, is_proven=True).entries, "a token proves by itself"


def test_a_conversation_that_changes_its_value_and_its_name_rivals_its_own_turns_alone():
    ledger = ledger_of(entry(1, says=1), entry(1, says=2))
    ledger.record(("ns", "chat"), entry(1, says=3))
    assert len(found(ledger, behind(LONG)).entries) == 2


@pytest.mark.parametrize("where", ["another name", "forgotten", "no base"])
def test_one_that_parted_later_counts_where_it_is_no_entry_beside(where):
    """Both were served the same first turn, and only one of them is found there."""
    second = behind(LONG)
    ledger = Ledger()
    if where == "no base":
        ledger.note_rival("ns", entry(2))
    else:
        ledger.record(("ns", "chat" if where == "another name" else ""), entry(2))
    if where == "forgotten":
        ledger.clear()
    first_of_one, second_of_one = entry(1), entry(1, HELLO, masked=second, says=1, depth=1)
    ledger.record(SCOPE, first_of_one)
    ledger.record(SCOPE, second_of_one)
    got = found(ledger, second + SUFFIX)
    assert (got.entries, got.lineage) == ((first_of_one,), None)


def test_a_public_turn_of_somebody_else_makes_nobody_the_same_conversation():
    """Else the private value of its next turn would be taken for one's own."""
    ledger = ledger_of(entry(1))
    got = found(ledger, OPENING + SUFFIX, public=True)
    assert (len(got.entries), got.lineage, got.depth) == (1, None, 0)
    assert found(ledger, behind(LONG), public=True).lineage == 1, "it goes on with the reply"


def test_a_rival_is_remembered_as_long_as_a_turn_that_it_rivals(monkeypatch):
    """However many turns leave a trace meanwhile: what is used stays, and so must its rival."""
    monkeypatch.setattr(rivals, "MAX_TRACES", 1)
    ledger = ledger_of(entry(1, says=1), scope=("ns", "chat"))
    ledger.note_rival("ns", entry(2, says=2))
    for number in range(3):
        ledger.note_rival("ns", entry(3, array("q", [number] * 9)))
    assert found(ledger, behind(LONG), scope=("ns", "chat")).reason == "not_proven"
    ledger.clear()
    ledger.note_rival("ns", entry(3, HELLO))
    ledger.record(SCOPE, entry(1, says=1))
    assert len(found(ledger, behind(LONG)).entries) == 1, "nothing of the rival is left"


def test_a_look_alike_whose_value_could_not_be_read_counts_too():
    """It is masked nowhere, so nothing but its reply tells that it may read like another."""
    window = Window(number=5, start=0, stop=1, value="v", around="")
    mine = entry(1)
    ledger = ledger_of(
        dataclasses.replace(mine, path=dataclasses.replace(mine.path, windows=(window,)))
    )
    for namespace, number, reply in (("ns2", 5, LONG), ("ns", 6, LONG), ("ns", 5, HELLO)):
        ledger.note_unread(namespace, number, reply)
    assert len(found(ledger, behind(LONG)).entries) == 1
    ledger.note_unread("ns", 5, LONG)
    assert found(ledger, behind(LONG)).reason == "not_proven"


def test_what_the_conversation_itself_lost_is_no_rival():
    ledger = ledger_of(*(entry(1, says=value) for value in range(MAX_PER_PLACE + 2)))
    assert len(found(ledger, behind(LONG)).entries) == MAX_PER_PLACE
    ledger.clear()
    ledger.record(SCOPE, entry(2, says=3))
    assert found(ledger, behind(LONG)).reason == "not_proven"
    again = ledger_of(entry(1, says=3))
    again.clear()
    again.record(SCOPE, entry(2, says=3))
    assert len(found(again, behind(LONG)).entries) == 1, "the same text shows nothing"


def test_a_claim_on_a_scope_needs_no_reply_and_stays_in_its_scope():
    mine = {"is_proven": True, "by_reply": False}
    kept = ledger_of(entry(1), scope=("ns", "chat"))
    assert len(found(kept, OPENING, scope=("ns", "chat"), **mine).entries) == 1
    for scope in (("ns", "other"), SCOPE, ("ns2", "chat")):
        assert found(kept, behind(LONG), scope=scope, **mine).entries == ()
    assert len(found(ledger_of(entry(1)), OPENING, public=True).entries) == 1


def test_a_name_narrows_and_proves_nothing():
    named = ledger_of(entry(1), scope=("ns", "chat"))
    assert found(named, OPENING, scope=("ns", "chat")).reason == "not_proven"
    assert len(found(named, behind(LONG), scope=("ns", "chat")).entries) == 1
    assert found(named, behind(LONG)).entries == ()


def test_where_replies_prove_nothing_what_is_remembered_changes_no_reason():
    """Nobody learns from a reason that somebody asked the same, and got the same reply."""
    for ledger in (Ledger(), ledger_of(entry(1)), ledger_of(entry(1, says=1), entry(2, says=2))):
        for prompt in (OPENING, OPENING + SUFFIX, behind(LONG), behind(HELLO)):
            got = found(ledger, prompt, by_reply=False)
            assert (got.entries, got.length, got.lineage) == ((), 0, None)
            assert got.reason == "not_proven"


def test_the_reasons_of_one_who_is_proven_are_about_her_own_turns():
    empty, theirs = Ledger(), ledger_of(entry(1))
    for ledger in (empty, theirs):
        for claim in ({"is_proven": True}, {"is_expired": True}):
            got = found(ledger, behind(HELLO), scope=("ns", "token"), by_reply=False, **claim)
            assert got.reason == "no_base"


def test_the_longest_turn_in_front_of_the_anchor_with_the_same_text_is_found():
    short, longer = entry(1), entry(1, HELLO, masked=behind(LONG), depth=1)
    ledger = ledger_of(short, longer)
    assert found(ledger, behind(HELLO, behind(LONG))).entries == (longer,)
    assert found(ledger, behind(HELLO, behind(LONG)), limit=30).entries == (short,)
    other = OPENING[:5] + array("q", [-9]) + OPENING[6:]
    assert found(ledger, behind(LONG, other)).entries == ()


def test_a_turn_served_again_replaces_itself_and_the_newest_comes_first():
    ledger = ledger_of(entry(1, says=1), entry(1, says=2), entry(1, says=1))
    assert [e.path.ids[0] for e in found(ledger, behind(LONG)).entries] == [1, 2]


def test_the_ledger_is_bounded_and_what_was_found_stays_longest(monkeypatch):
    monkeypatch.setattr(module, "MAX_ENTRIES", 2)
    first, second = entry(1), entry(2, masked=OPENING + SUFFIX)
    ledger = ledger_of(first, second)
    found(ledger, behind(LONG))
    ledger.record(SCOPE, entry(3, masked=OPENING + HELLO))
    assert len(ledger) == 2
    assert found(ledger, behind(LONG)).entries == (first,)


def test_to_forget_everything_is_a_restart_whose_lineages_go_on():
    ledger = ledger_of(entry(3, says=1), entry(4, says=2))
    ledger.note_unread(SCOPE[0], 0, LONG)
    ledger.forget_everything(last_lineage=9)
    assert len(ledger) == 0 and ledger.new_lineage() == 10
    ledger.record(SCOPE, entry(10, says=3))
    assert found(ledger, behind(LONG)).lineage == 10, "no trace of the look-alikes is left"
