"""Plans: where spans lie, why a match is refused, and that a plan is a pure function."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import to_builtins

from kvedit.namespace import SHARED
from kvedit.request.options import Options
from kvedit.skills.declaration import SkillDeclaration
from kvedit.skills.registry import Registry
from kvedit.splice.planner import PlanLimits, plan_spans

NS = "ns:mine"
LIMITS = PlanLimits(page_size=1, min_span_tokens=16, default_seam=8, last_position=10**6)


def text(seed, num_tokens):
    return array("q", range(seed * 10_000, seed * 10_000 + num_tokens))


def registry_of(*contents, ready=True, **fields):
    registry = Registry("host", retired_max=8)
    for i, content in enumerate(contents):
        declare(registry, f"skill{i}", content, ready=ready, **fields)
    return registry


def declare(registry, name, content, *, ready=True, **fields):
    options = {"namespace": SHARED, "compile_prefix": array("q"), "replace": True} | fields
    declaration = SkillDeclaration(name=name, token_ids=content, **options)
    skill = registry.declare(declaration, f"rid-{name}-{registry.version}").skill
    if ready:
        registry.compiled(skill.rid)
    return skill


def plan(registry, prompt, options=None, namespace=NS, **limits):
    fields = {"last_position": len(prompt) - 1} | limits
    used = PlanLimits(
        **{name: fields.get(name, getattr(LIMITS, name)) for name in PlanLimits.__slots__}
    )
    return plan_spans(prompt, registry, namespace, options or Options(), used, lambda a, b: "")


def intervals(made):
    return [(s.source.number, s.start, s.stop, s.seam) for s in made.spans]


def reasons(made):
    return [(r.skill, r.reason) for r in made.refused]


HEAD, TAIL = text(900, 10), text(901, 5)


def test_a_span_leaves_the_seam_out():
    skill = text(1, 50)
    made = plan(registry_of(skill), HEAD + skill + TAIL)
    assert intervals(made) == [(1, 18, 60, 8)]
    assert made.spans[0].delta_pos == 10
    assert made.refused == () and made.history == ()


def test_the_requests_seam_goes_before_the_skills_and_that_before_the_servers():
    skill = text(1, 50)
    registry = registry_of(skill, seam=4)
    prompt = HEAD + skill + TAIL
    assert intervals(plan(registry, prompt)) == [(1, 14, 60, 4)]
    assert intervals(plan(registry, prompt, Options(seam=0))) == [(1, 10, 60, 0)]


def test_a_span_behind_a_composed_one_has_no_seam_and_one_behind_a_gap_has():
    first, second = text(1, 40), text(2, 40)
    registry = registry_of(first, second)
    assert intervals(plan(registry, HEAD + first + second + TAIL)) == [
        (1, 18, 50, 8),
        (2, 50, 90, 0),
    ]
    assert [s.seam for s in plan(registry, HEAD + first + TAIL + second + TAIL).spans] == [8, 8]


def test_a_match_behind_a_refused_one_keeps_its_seam():
    """The first skill is too short to compose, so the second one follows real tokens."""
    first, second = text(1, 20), text(2, 40)
    made = plan(registry_of(first, second), HEAD + first + second + TAIL)
    assert intervals(made) == [(2, 38, 70, 8)]
    assert reasons(made) == [("skill0", "too_short")]


def test_the_prompts_last_token_is_never_composed():
    skill = text(1, 50)
    assert intervals(plan(registry_of(skill), HEAD + skill)) == [(1, 18, 59, 8)]


def test_a_logprob_window_ends_the_spans():
    skill = text(1, 50)
    made = plan(registry_of(skill), HEAD + skill + TAIL, last_position=40)
    assert intervals(made) == [(1, 18, 40, 8)]
    nothing = plan(registry_of(skill), HEAD + skill + TAIL, last_position=0)
    assert (nothing.spans, reasons(nothing)) == ((), [("skill0", "too_short")])


def test_a_prompt_that_leaves_the_skill_is_told_where():
    skill = text(1, 50)
    other = skill[:30] + array("q", [7]) + skill[31:]
    made = plan(registry_of(skill), HEAD + other + TAIL)
    assert intervals(made) == [(1, 18, 40, 8)]
    assert to_builtins(made.refused[0].to_report()) == {
        "skill": "skill0",
        "reason": "differs_at",
        "index": 30,
        "position": 40,
    }


def test_a_prompt_that_stops_inside_the_skill_is_no_difference():
    skill = text(1, 50)
    assert plan(registry_of(skill), HEAD + skill[:40]).refused == ()


def test_a_seam_longer_than_the_skill_is_refused_by_name():
    skill = text(1, 50)
    made = plan(registry_of(skill), HEAD + skill + TAIL, Options(seam=51))
    assert (made.spans, reasons(made)) == ((), [("skill0", "seam_too_long")])


def test_pages_round_inwards_and_the_donor_holds_whole_pages_only():
    skill = text(1, 60)
    made = plan(registry_of(skill), HEAD + skill + TAIL, page_size=16)
    # starts at 18 -> 32; ends at 70, but the donor's tree holds 48 of its 60 tokens: 58 -> 48
    assert intervals(made) == [(1, 32, 48, 22)]


def test_a_compile_prefix_shifts_the_donor_and_its_pages():
    skill = text(1, 60)
    registry = registry_of(skill, compile_prefix=array("q", [1, 2, 3, 4]))
    [s] = plan(registry, HEAD + skill + TAIL, page_size=16).spans
    assert (s.prefix_len, s.delta_pos) == (4, 6)
    assert (s.start, s.stop) == (32, 64)  # 4 + 60 is four whole pages
    assert s.donor_interval(s.start, s.stop) == (26, 58)


def test_off_plans_nothing_and_names_restrict():
    first, second = text(1, 40), text(2, 40)
    registry = registry_of(first, second)
    prompt = HEAD + first + TAIL + second + TAIL
    assert plan(registry, prompt, Options(splice="off")).alternatives == ()
    assert [s.source.number for s in plan(registry, prompt, Options(skills=("skill1",))).spans] == [
        2
    ]


def test_names_that_bring_nothing_say_why():
    registry = registry_of(text(1, 40), text(2, 40))
    made = plan(registry, HEAD + text(1, 40), Options(skills=("skill0", "skill1", "nobody")))
    assert reasons(made) == [("skill1", "not_in_prompt"), ("nobody", "unknown_skill")]


def test_a_name_that_is_only_retired_says_so_and_never_raises():
    """A request that names it must be refused or served, not lose its plan to an error."""
    skill, other = text(1, 50), text(2, 50)
    registry = registry_of(skill, other)
    registry.retire("skill0", SHARED)
    options = Options(splice="require", skills=("skill0", "skill1"))
    made = plan(registry, HEAD + other + TAIL, options)
    assert reasons(made) == [("skill0", "retired")]
    assert intervals(made) == [(2, 18, 60, 8)]
    inside = plan(registry, HEAD + skill + TAIL, Options(skills=("skill0",)))
    assert (inside.spans, len(inside.history)) == ((), 1), "a cached path may still serve it"


def test_a_skill_too_short_to_be_found_says_so():
    registry = registry_of(text(1, 6))
    made = plan(registry, HEAD + text(1, 6) + TAIL, Options(skills=("skill0",)))
    assert reasons(made) == [("skill0", "too_short")]


def test_a_retired_skill_stays_in_the_history_only():
    skill = text(1, 40)
    registry = registry_of(skill)
    before = plan(registry, HEAD + skill + TAIL)
    registry.retire("skill0", SHARED)
    after = plan(registry, HEAD + skill + TAIL)
    assert (after.spans, after.history) == ((), before.spans)


def test_a_replaced_skill_leaves_both_layers():
    old, new = text(1, 40), text(1, 30) + text(2, 30)
    registry = registry_of(old)
    declare(registry, "skill0", new)
    made = plan(registry, HEAD + old + TAIL)
    assert [(s.source.number, s.stop) for s in made.spans] == [(2, 40)], (
        "as far as the new text goes"
    )
    assert [(s.source.number, s.stop) for s in made.history] == [(1, 50)]


def test_the_spans_from_before_an_overlapping_newcomer_stay_an_alternative():
    skill = text(1, 40)
    registry = registry_of(skill)
    prompt = HEAD + skill + TAIL
    before = plan(registry, prompt)
    assert before.older == ()
    declare(registry, "longer", HEAD[4:] + skill + TAIL[:2])
    after = plan(registry, prompt)
    assert [s.source.number for s in after.spans] == [2]
    assert after.older == (before.spans,)
    declare(registry, "part", skill[10:30])
    assert plan(registry, prompt).older == (before.spans,), "it is inside, and comes to nothing"


def test_a_newcomer_elsewhere_adds_no_alternative():
    first, second = text(1, 40), text(2, 40)
    registry = registry_of(first, second)
    assert plan(registry, HEAD + first + second + TAIL).older == ()


def test_another_namespaces_skill_is_invisible():
    skill = text(1, 40)
    registry = registry_of(skill, namespace="ns:other")
    made = plan(registry, HEAD + skill + TAIL, Options(skills=("skill0",)))
    assert (made.spans, reasons(made)) == ((), [("skill0", "unknown_skill")])


@pytest.mark.parametrize("state", ["compiling", "evicted"])
def test_skills_that_may_come_back_are_planned(state):
    """Whether they can be composed is found out at admission, not here."""
    skill = text(1, 40)
    registry = registry_of(skill, ready=state == "evicted")
    if state == "evicted":
        registry.evict_all()
    assert registry.by_number(1).state.value == state
    assert [s.source.number for s in plan(registry, HEAD + skill + TAIL).spans] == [1]


BLOCKS = [text(n, 30) for n in range(1, 4)]
parts = st.lists(
    st.one_of(
        st.sampled_from(BLOCKS),
        st.integers(0, 30).map(lambda n: text(50 + n, n)),
        st.tuples(st.sampled_from(BLOCKS), st.integers(0, 30)).map(lambda p: p[0][: p[1]]),
    ),
    max_size=6,
)


@settings(max_examples=300, deadline=None)
@given(parts, st.sampled_from([1, 4, 16]), st.integers(0, 20), st.integers(1, 12))
def test_spans_lie_where_they_may(chosen, page, seam, least):
    prompt = sum(chosen, array("q")) + array("q", [5])
    registry = registry_of(*BLOCKS)
    made = plan(registry, prompt, page_size=page, default_seam=seam, min_span_tokens=least)
    end = 0
    for s in made.spans:
        segment = registry.by_number(s.source.number).segment
        assert end <= s.match_start <= s.start and s.start >= end
        assert s.start % page == 0 and s.stop % page == 0
        assert s.stop - s.start >= least and s.stop <= len(prompt) - 1
        assert (
            prompt[s.match_start : s.stop]
            == segment.token_ids[s.match_start - s.base : s.stop - s.base]
        ), "a span supplies exactly the prompt's tokens"
        low, high = s.donor_interval(s.start, s.stop)
        whole_pages = segment.num_tokens // page * page
        assert low >= 0 and high <= whole_pages, "the donor's tree holds what the span asks for"
        end = s.stop
    again = plan(registry, prompt, page_size=page, default_seam=seam, min_span_tokens=least)
    assert made == again
    assert made.registry_version == registry.version


def test_what_requires_reuse_gets_it_at_any_price():
    skill = text(1, 50)
    registry = registry_of(skill)
    prompt = HEAD + skill + TAIL
    usual = plan(registry, prompt, boundary_tokens=40).worth
    assert (usual.boundary, usual.min_saving) == (40, LIMITS.min_span_tokens)
    for options in (Options(splice="require", skills=("skill0",)), Options(edits="require")):
        worth = plan(registry, prompt, options, boundary_tokens=40).worth
        assert (worth.boundary, worth.min_saving) == (0, 1)
