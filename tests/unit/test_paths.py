"""The choice of a path against brute force over every spelling."""

from __future__ import annotations

from array import array
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvedit.splice.spans import Worth, cut, overlap, served_ids
from kvedit.splice.spelling import MAX_MATCHES, choose_path
from tests.unit.spans_of import span, whole

NUM_TOKENS = 60
REAL = array("q", range(100, 100 + NUM_TOKENS))
SPANS = (span(4, 14, 1), span(14, 20, 2), span(26, 38, 3), span(44, 55, 4))


class Tree:
    """What a radix tree knows: some sequences, any prefix of which is a hit."""

    def __init__(self, *stored):
        self.stored = stored
        self.num_matches = 0

    def match(self, pieces):
        self.num_matches += 1
        served = served_ids(REAL, pieces)
        return max((common(served, s) for s in self.stored), default=0)


def common(left, right):
    n = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        n += 1
    return n


def stored(spans, length):
    return served_ids(REAL[:length], whole(*spans))


def choose(tree, alternatives, composable=lambda span: True):
    return choose_path(alternatives, num_tokens=NUM_TOKENS, match=tree.match, composable=composable)


def cost(pieces, matched, composable):
    """(computed, composed) of a spelling, counted token by token."""
    served = tuple(
        q
        for p in pieces
        for q in ([p] if p.stop <= matched or composable(p.span) else cut((p,), matched))
    )
    composed = {i for p in served for i in range(p.start, p.stop)}
    computed = sum(1 for i in range(matched, NUM_TOKENS) if i not in composed)
    return computed, len(composed)


def subsets(spans):
    return [c for n in range(len(spans) + 1) for c in combinations(spans, n)]


trees = st.lists(
    st.tuples(st.lists(st.sampled_from(SPANS), unique=True), st.integers(0, NUM_TOKENS)),
    max_size=4,
)


@settings(max_examples=400, deadline=None)
@given(
    trees, st.sets(st.sampled_from([s.source.number for s in SPANS])), st.integers(0, len(SPANS))
)
def test_no_spelling_is_cheaper_than_the_chosen_one(cached, lost_segments, num_spans):
    tree = Tree(*(stored(spans, length) for spans, length in cached))
    spans = SPANS[:num_spans]

    def composable(span):
        return span.source.number not in lost_segments

    choice = choose(tree, [spans], composable)
    assert tree.num_matches <= MAX_MATCHES
    best = min(cost(whole(*kept), tree.match(whole(*kept)), composable) for kept in subsets(spans))
    assert (choice.computed, overlap(choice.pieces, 0, NUM_TOKENS)) == best


@settings(max_examples=400, deadline=None)
@given(trees, st.sets(st.sampled_from(SPANS)), st.integers(0, NUM_TOKENS))
def test_a_key_cut_behind_the_deepest_look_is_given_the_same_choice(cached, lost, limit):
    tree = Tree(*(stored(spans, length) for spans, length in cached))
    choice = choose(tree, [SPANS], lambda span: span not in lost)
    of_a_cut_key = choose_path(
        [SPANS],
        num_tokens=NUM_TOKENS,
        match=lambda pieces: min(tree.match(pieces), limit),
        composable=lambda span: span not in lost,
    )
    assert choice.deepest >= choice.matched
    assert choice == of_a_cut_key or choice.deepest > limit


@settings(max_examples=200, deadline=None)
@given(trees, st.sets(st.sampled_from([s.source.number for s in SPANS])))
def test_a_choice_never_composes_what_may_not_be_composed(cached, lost_segments):
    tree = Tree(*(stored(spans, length) for spans, length in cached))
    choice = choose(tree, [SPANS], lambda span: span.source.number not in lost_segments)
    for piece in choice.pieces:
        assert piece.stop <= choice.matched or piece.span.source.number not in lost_segments
    assert {s.source.number for s in choice.lost} <= lost_segments


def test_an_empty_tree_composes_everything():
    choice = choose(Tree(), [SPANS])
    assert choice.pieces == whole(*SPANS)
    assert (choice.matched, choice.computed) == (0, NUM_TOKENS - 10 - 6 - 12 - 11)


def test_a_tie_goes_to_exact():
    """Both spellings cached as far as the end: the real one is served."""
    tree = Tree(stored(SPANS, NUM_TOKENS), stored((), NUM_TOKENS))
    assert choose(tree, [SPANS]).pieces == ()


def test_a_longer_exact_path_wins_over_composing():
    tree = Tree(stored((), NUM_TOKENS - 1))
    choice = choose(tree, [SPANS])
    assert (choice.pieces, choice.matched, choice.computed) == ((), NUM_TOKENS - 1, 1)


def test_a_shorter_exact_path_is_continued_by_composing():
    """Real as far as position 24, then two skills: exact first, the rest is copied."""
    tree = Tree(stored((), 24))
    choice = choose(tree, [SPANS])
    assert choice.pieces == whole(*SPANS[2:])
    assert (choice.matched, choice.computed) == (24, NUM_TOKENS - 24 - 12 - 11)


def test_a_mixture_made_by_an_earlier_turn_is_found_again():
    """The second skill was registered later: the path is composed, real, composed."""
    tree = Tree(stored((SPANS[0], SPANS[2]), 44))
    choice = choose(tree, [SPANS])
    assert choice.pieces == whole(SPANS[0], SPANS[2], SPANS[3])
    assert (choice.matched, choice.computed) == (44, NUM_TOKENS - 44 - 11)


def test_a_retired_skill_serves_its_cached_path_and_no_more():
    tree = Tree(stored(SPANS[:1], 10))
    choice = choose(tree, [(), SPANS[:1]], lambda span: False)
    assert choice.pieces == cut(whole(SPANS[0]), 10)
    assert (choice.matched, choice.computed) == (10, NUM_TOKENS - 10)
    assert choice.lost == (SPANS[0],)


def test_a_span_that_cannot_be_composed_is_named_though_plain_costs_the_same():
    """Else nobody would learn that the skill is evicted, and nobody would recompile it."""
    for tree in (Tree(), Tree(stored((), 3)), Tree(stored((), 20))):
        choice = choose(tree, [SPANS[2:3]], lambda span: False)
        assert (choice.pieces, choice.lost) == ((), (SPANS[2],))
    assert choose(Tree(stored((), NUM_TOKENS)), [SPANS], lambda span: False).lost == ()


def test_history_is_used_only_where_it_saves_tokens():
    live, old = (span(4, 30, 9),), (span(4, 14, 1),)
    assert choose(Tree(), [live, old]).pieces == whole(*live)
    tree = Tree(stored(old, NUM_TOKENS - 1))
    assert choose(tree, [live, old], lambda s: s.source.number == 9).pieces == whole(*old)


def test_the_search_is_bounded():
    """Thirty spans whose every prefix is cached both ways do not cost 2^30 look-ups."""
    spans = tuple(span(2 * i, 2 * i + 1, i + 1) for i in range(1, 29))
    tree = Tree(*(stored(spans[:i], NUM_TOKENS) for i in range(len(spans))))
    choice = choose(tree, [spans, spans[::2]])
    assert tree.num_matches <= MAX_MATCHES + 1
    assert choice.computed < NUM_TOKENS


# ---- what a choice weighs


def weigh(tree, spans, worth, num_tokens=NUM_TOKENS):
    return choose_path(
        [spans], num_tokens=num_tokens, match=tree.match, composable=lambda s: True, worth=worth
    )


def test_a_forced_boundary_must_pay():
    choice = weigh(Tree(), SPANS, Worth(boundary=11))
    assert choice.pieces == whole(*SPANS[:3])  # 4..20 is one run, 44..55 holds 11 tokens
    assert [(source.number, r.reason) for source, r in choice.unpaid] == [(4, "not_worth_a_pass")]
    assert choice.computed == NUM_TOKENS - 16 - 12


def test_a_run_that_starts_where_the_cached_prefix_ends_is_free():
    tree = Tree(stored(SPANS[:3], 44))
    choice = weigh(tree, SPANS, Worth(boundary=1000))
    assert (choice.pieces, choice.unpaid) == (whole(*SPANS), ())


def test_runs_that_did_not_pay_are_found_real_between_composed_ones():
    """What an earlier turn served: some spans composed, the short ones real."""
    spans = tuple(span(100 * i, 100 * i + (50 if i % 5 == 1 else 5), i) for i in range(1, 60))
    kept = tuple(s for s in spans if s.source.number % 5 == 1)
    real = array("q", range(100_000, 106_100))
    cached = served_ids(real, whole(*kept))
    looks = []

    def match(pieces):
        looks.append(1)
        return common(served_ids(real, pieces), cached[:5899])

    choice = choose_path(
        [spans],
        num_tokens=len(real),
        match=match,
        composable=lambda s: True,
        worth=Worth(boundary=20),
    )
    assert choice.matched == 5899
    assert choice.pieces == whole(*kept)
    assert len(looks) <= MAX_MATCHES


def test_a_long_conversation_is_found_again_though_every_turn_left_short_runs_real():
    """One long run that paid and one short run that did not, in each of a hundred turns."""
    spans = tuple(span(100 * i, 100 * i + (50 if i % 2 else 5), i) for i in range(1, 200))
    kept = tuple(s for s in spans if s.source.number % 2)
    real = array("q", range(100_000, 120_000))
    cached = served_ids(real[:20_000], whole(*kept))

    def match(pieces):
        return common(served_ids(real, pieces), cached)

    choice = choose_path(
        [spans],
        num_tokens=len(real),
        match=match,
        composable=lambda s: True,
        worth=Worth(boundary=20, min_saving=16),
    )
    assert (choice.matched, choice.num_boundaries) == (20_000, 0)


def test_exact_tokens_are_given_up_for_a_minimum_only():
    """Cached exactly up to some tokens in front of a skill's end: composing it again would save
    just these."""
    spans = SPANS[:1]  # 4..14
    for saved in range(1, 10):
        tree = Tree(stored((), 14 - saved))
        choice = weigh(tree, spans, Worth(min_saving=4))
        assert choice.pieces == (whole(*spans) if saved >= 4 else ())
        assert choice.matched == (4 if saved >= 4 else 14 - saved)


def test_a_composed_path_with_much_behind_it_wins_over_a_shorter_exact_one():
    tree = Tree(stored(SPANS[:1], 50), stored((), 13))
    choice = weigh(tree, SPANS[:1], Worth(min_saving=16))
    assert (choice.pieces, choice.matched) == (whole(*SPANS[:1]), 50)
