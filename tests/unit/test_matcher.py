"""The matcher against a slow and obvious one, and each rule on its own."""

import random
from array import array

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvedit.namespace import SHARED
from kvedit.skills import matcher as matcher_module
from kvedit.skills.matcher import Match, Matcher
from kvedit.skills.segment import Segment

NS = "ns:mine"
LETTERS = {1: "a", 2: "b", 3: "ab", 4: "ba", 5: "\ufffd", 6: ""}  # 3 is what a merge makes of 1, 2


def segment(number, token_ids, namespace=SHARED):
    return Segment(
        number=number,
        name=f"skill{number}",
        namespace=namespace,
        token_ids=array("q", token_ids),
        compile_prefix=array("q"),
        version=1,
        seam=None,
        identity="",
    )


def decode(token_ids):
    return "".join(LETTERS.get(t, f"<{t}>") for t in token_ids)


def matcher_of(*segments):
    made = Matcher()
    for s in segments:
        made.add(s, [decode(s.token_ids[:e]) for e in range(min(8, s.num_tokens) + 1)])
    return made


def find(made, prompt, namespace=NS, **options):
    prompt = array("q", prompt)
    return made.find(prompt, namespace, lambda a, b: decode(prompt[a:b]), **options)


def obvious(segments, prompt, namespace, only=None):
    """Try every skill, skipped length and position, in the order of preference."""
    matches, at = [], 0
    while at < len(prompt):
        here = []
        for s in segments:
            if s.namespace not in (namespace, SHARED) or (
                only is not None and s.number not in only
            ):
                continue
            for e in range(min(8, s.num_tokens) + 1):
                n = common(prompt[at:], s.token_ids[e:])
                if n >= 8 and head_agrees(s, e, prompt[max(0, at - 16) : at]):
                    here.append((-n, s.number, e))
        if here:
            n, number, e = min(here)
            matches.append(Match(number, e, at, -n))
            at += -n
        else:
            at += 1
    return matches


def head_agrees(s, e, before):
    head = decode(s.token_ids[:e])
    if e == 0:
        return True
    return head != "" and "\ufffd" not in head and decode(before).endswith(head)


def common(left, right):
    n = 0
    while n < min(len(left), len(right)) and left[n] == right[n]:
        n += 1
    return n


SKILL = list(range(100, 140))


def test_a_skill_is_found_at_any_offset_and_more_than_once():
    made = matcher_of(segment(1, SKILL))
    assert find(made, [9, 9, *SKILL, 8, *SKILL, *SKILL]) == [
        Match(1, 0, 2, 40),
        Match(1, 0, 43, 40),
        Match(1, 0, 83, 40),
    ]


def test_a_match_ends_where_the_prompt_differs_and_never_resumes():
    """ "14 days" for "30 days": nothing behind that number may be spliced."""
    made = matcher_of(segment(1, SKILL))
    changed = [*SKILL[:20], 999, *SKILL[21:]]
    assert find(made, [9, *changed]) == [Match(1, 0, 1, 20)]


@pytest.mark.parametrize("position", range(9))
def test_a_difference_in_the_text_of_the_edge_gets_nothing(position):
    made = matcher_of(segment(1, SKILL))
    changed = [*SKILL[:position], 999, *SKILL[position + 1 :]]
    assert find(made, [9, *changed]) == ([Match(1, 0, 1, 8)] if position == 8 else [])


def test_a_prompt_that_starts_inside_the_skill_gets_nothing():
    made = matcher_of(segment(1, SKILL))
    for skipped in range(1, 20):
        assert find(made, SKILL[skipped:]) == []


def test_a_merge_at_the_edge_matches_behind_it():
    made = matcher_of(segment(1, [1, 2, *SKILL]))
    assert find(made, [9, 3, *SKILL]) == [Match(1, 2, 2, 40)]
    assert find(made, [9, 4, *SKILL]) == []  # the text is "ba", the skill's "ab"


def test_no_more_than_eight_tokens_are_skipped():
    for num_edge, found in ((8, 1), (9, 0)):
        made = matcher_of(segment(1, [1, 2] * (num_edge // 2) + [1] * (num_edge % 2) + SKILL))
        prompt = [9] + [3] * (num_edge // 2) + ([1] if num_edge % 2 else []) + SKILL
        # the odd case's ids agree from the ninth token on: nothing earlier may anchor it
        prompt = prompt if num_edge == 8 else [9, *[3] * 4, 7, *SKILL]
        assert len(find(made, prompt)) == found


@pytest.mark.parametrize("edge", [[5], [6]], ids=["split character", "empty text"])
def test_an_edge_whose_text_proves_nothing_is_never_skipped(edge):
    made = matcher_of(segment(1, edge + SKILL))
    assert find(made, [9, *edge, *SKILL]) == [Match(1, 0, 1, 41)]
    for prompt in ([9, 7, *SKILL], SKILL):
        assert 1 not in [m.skill_start for m in find(made, prompt)]


def test_a_split_character_spoils_every_longer_edge_as_well():
    assert find(matcher_of(segment(1, [5, *SKILL])), [9, 5, 7, *SKILL]) == []


def test_a_match_has_at_least_eight_tokens():
    made = matcher_of(segment(1, SKILL), segment(2, [50, 51, 52]))
    assert find(made, [*SKILL[:7], 9]) == []
    assert find(made, [*SKILL[:8], 9]) == [Match(1, 0, 0, 8)]
    assert find(made, [50, 51, 52]) == []
    assert find(made, []) == []


def test_leftmost_then_longest_then_lowest_number():
    long, short = SKILL, SKILL[:20]
    left = [70, 71, *SKILL[:10]]
    assert find(matcher_of(segment(1, short), segment(2, long)), SKILL) == [Match(2, 0, 0, 40)]
    assert find(matcher_of(segment(2, long), segment(1, long)), SKILL) == [Match(1, 0, 0, 40)]
    made = matcher_of(segment(1, long), segment(2, left))
    assert find(made, [70, 71, *SKILL]) == [Match(2, 0, 0, 12)]


def test_where_only_the_edge_is_overlapped_the_next_skill_still_matches():
    first, second = [*range(10, 30), 1], [1, *SKILL]
    made = matcher_of(segment(1, first), segment(2, second))
    assert find(made, [*first, *SKILL]) == [Match(1, 0, 0, 21), Match(2, 1, 21, 40)]


def test_only_the_own_and_the_shared_namespace_are_searched():
    made = matcher_of(
        segment(1, SKILL, "ns:other"), segment(2, SKILL, NS), segment(3, SKILL, SHARED)
    )
    assert [m.number for m in find(made, SKILL, NS)] == [2]
    assert [m.number for m in find(made, SKILL, "ns:other")] == [1]
    assert [m.number for m in find(made, SKILL, "ns:third")] == [3]
    assert [m.number for m in find(made, SKILL, SHARED)] == [3]


def test_only_uncovers_what_another_skill_hid():
    made = matcher_of(segment(1, SKILL), segment(2, SKILL))
    assert [m.number for m in find(made, SKILL, only={2})] == [2]
    assert find(made, SKILL, only=set()) == []


def test_a_removed_segment_is_gone_and_its_twin_is_not():
    made = matcher_of(segment(1, SKILL), segment(2, SKILL))
    made.remove(1)
    assert [m.number for m in find(made, SKILL)] == [2]
    made.remove(2)
    assert find(made, SKILL) == [] and len(made) == 0
    assert not made._bloom.any() and not made._anchors
    with pytest.raises(KeyError):
        made.remove(2)


def test_a_number_is_added_once():
    made = matcher_of(segment(1, SKILL))
    with pytest.raises(ValueError, match="expected a new segment, got 1"):
        made.add(segment(1, SKILL), [""])


def test_when_every_hash_collides_the_answer_stays_the_same(monkeypatch):
    """Ids decide, never a hash: a constant hash only makes the search slow."""
    monkeypatch.setattr(
        matcher_module,
        "_window_hashes",
        lambda ids: np.full(max(0, len(ids) - 7), 12345, dtype=np.uint64),
    )
    skills = [segment(1, [1, 2, *SKILL]), segment(2, SKILL[5:])]
    prompt = array("q", [9, 3, *SKILL, 7, *SKILL[5:], 1])
    assert find(matcher_of(*skills), prompt) == obvious(skills, prompt, NS) != []


def test_the_hash_of_a_window_depends_on_every_id_and_its_place():
    window = array("q", range(1, 9))
    reference = matcher_module._window_hashes(window)[0]
    for i in range(8):
        for value in (0, 100, 2**40):
            changed = window[:]
            changed[i] = value
            assert matcher_module._window_hashes(changed)[0] != reference
    swapped = array("q", [2, 1, 3, 4, 5, 6, 7, 8])
    assert matcher_module._window_hashes(swapped)[0] != reference


@pytest.mark.parametrize("block", [[7], [8, *[7] * 30], None], ids=["run", "period", "random"])
def test_a_crafted_prompt_buys_a_bounded_number_of_decodes(block):
    """Each of its positions may propose an anchor; it must not cost a decode each."""
    made = matcher_of(segment(1, [1] + [7] * 50))
    rng = random.Random(0)
    blocks = [block or [rng.randrange(8, 10**6), *[7] * 12] for _ in range(4000)]
    prompt, calls = array("q", [t for b in blocks for t in b]), []

    def tail_text(a, b):
        calls.append((a, b))
        return decode(prompt[a:b])

    assert made.find(prompt, NS, tail_text) == []
    assert len(calls) == len(set(prompt[a:b].tobytes() for a, b in calls))
    assert len(calls) <= (matcher_module.MAX_DECODES if block is None else 40)


# Few different ids, so that chance makes overlaps, repeats, merges and near misses.
some_ids = st.lists(st.sampled_from([1, 2, 3, 4, 5, 6, 7]), max_size=30)
pieces = st.one_of(
    some_ids,
    st.tuples(st.integers(0, 3), st.integers(0, 12), st.integers(0, 40)),  # a cut of a skill
)


@st.composite
def cases(draw):
    contents = draw(
        st.lists(
            st.lists(st.sampled_from([1, 2, 3, 4, 5, 6, 7]), min_size=1, max_size=40)
            | st.tuples(
                st.sampled_from([[], [1], [2], [1, 2], [5], [6, 1], [1, 1, 2]]),
                st.integers(1, 7),
                st.integers(7, 40),
            ).map(lambda t: t[0] + [t[1]] * t[2])
            | st.integers(0, 6).map(lambda k: [1, 2, *range(20 + k, 50)]),
            min_size=1,
            max_size=4,
        )
    )
    owners = st.sampled_from([SHARED, NS, "ns:other"])
    skills = [segment(i + 1, c, draw(owners)) for i, c in enumerate(contents)]
    prompt = array("q")
    for piece in draw(st.lists(pieces, max_size=6)):
        if isinstance(piece, tuple):
            which, start, stop = piece
            prompt += skills[which % len(skills)].token_ids[start:stop]
        else:
            prompt.extend(piece)
    return skills, prompt


@settings(max_examples=400, deadline=None)
@given(cases(), st.sampled_from([None, {1}, {2, 3}]))
@example(([segment(1, [1] + [7] * 30)], array("q", [1] * 9 + [7] * 20)), None)
def test_it_agrees_with_the_obvious_search(case, only):
    skills, prompt = case
    found = find(matcher_of(*skills), prompt, only=only)
    assert found == obvious(skills, prompt, NS, only)


@settings(max_examples=100, deadline=None)
@given(cases(), st.data())
def test_adding_and_removing_leaves_what_a_fresh_matcher_finds(case, data):
    skills, prompt = case
    made = matcher_of(*skills)
    gone = data.draw(st.sets(st.sampled_from([s.number for s in skills])))
    for number in gone:
        made.remove(number)
    rest = [s for s in skills if s.number not in gone]
    assert find(made, prompt) == find(matcher_of(*rest), prompt)


def test_a_match_across_the_blocks_of_a_long_prompt():
    made = matcher_of(segment(1, SKILL))
    block = matcher_module._BLOCK_TOKENS
    for start in (block - 41, block - 8, block - 7, block - 1, block, 2 * block - 3):
        prompt = [9] * start + SKILL + [9] * block
        assert find(made, prompt) == [Match(1, 0, start, 40)]
        assert find(made, [9] * start + SKILL[:8]) == [Match(1, 0, start, 8)]
