"""The registry: which moves between states there are, and what stays matchable."""

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvedit.checks import check_ids, check_name, check_seam
from kvedit.errors import BadRequest, Conflict, NotFound
from kvedit.namespace import SHARED
from kvedit.skills.declaration import SkillDeclaration
from kvedit.skills.registry import Registry
from kvedit.skills.segment import State

NS = "ns:mine"
OTHER = "ns:other"


def ids(*values):
    return array("q", values)


def text(seed, num_tokens=20):
    return array("q", range(seed * 1000, seed * 1000 + num_tokens))


def declare(registry, name="policy", content=None, **changes):
    rid = changes.pop("rid", f"rid-{len(registry.all())}-{registry.version}-{name}")
    content = text(1) if content is None else content
    fields = {"namespace": NS, "compile_prefix": ids()} | changes
    return registry.declare(SkillDeclaration(name=name, token_ids=content, **fields), rid)


def ready(registry, name="policy", content=None, **changes):
    skill = declare(registry, name, content, **changes).skill
    registry.compiled(skill.rid)
    return skill


@pytest.fixture
def registry():
    return Registry("host", retired_max=4)


# ---- declare


def test_a_new_skill_compiles_and_becomes_ready(registry):
    declared = declare(registry, rid="r1")
    assert declared.outcome == "compile"
    assert (declared.skill.state, declared.skill.rid) == (State.COMPILING, "r1")
    assert registry.by_rid("r1") is declared.skill
    assert registry.compiled("r1") is declared.skill
    assert (declared.skill.state, declared.skill.rid) == (State.READY, None)
    assert registry.by_rid("r1") is None


@pytest.mark.parametrize("finished", [False, True])
def test_the_same_content_again_changes_nothing(registry, finished):
    skill = declare(registry, rid="r1").skill
    if finished:
        registry.compiled("r1")
    version = registry.version
    again = declare(registry, rid="r2")
    assert (again.outcome, again.skill) == ("exists", skill)
    assert registry.version == version
    assert registry.by_rid("r2") is None


def test_other_content_needs_replace(registry):
    skill = ready(registry)
    with pytest.raises(Conflict, match="expected the content of version 1 or replace=true"):
        declare(registry, content=text(2))
    assert registry.get("policy", NS) is skill and skill.state is State.READY


def test_another_compile_prefix_is_other_content(registry):
    ready(registry)
    with pytest.raises(Conflict):
        declare(registry, compile_prefix=ids(0))


def test_replace_retires_the_old_and_counts_on(registry):
    old = ready(registry)
    new = declare(registry, content=text(2), replace=True).skill
    assert (old.state, new.state) == (State.RETIRED, State.COMPILING)
    assert (old.number, new.number) == (1, 2)
    assert (old.segment.version, new.segment.version) == (1, 2)
    assert registry.get("policy", NS) is new
    assert registry.by_number(1) is old
    assert old.segment.identity != new.segment.identity


def test_retired_content_comes_back_under_its_number(registry):
    """Otherwise its retired twin, the lower number, would win every tie and never be spliced."""
    old = ready(registry)
    ready(registry, content=text(2), replace=True)
    back = declare(registry, content=text(1), replace=True)
    assert (back.outcome, back.skill) == ("compile", old)
    assert registry.compiled(old.rid).state is State.READY
    assert registry.by_number(2).state is State.RETIRED


def test_content_that_comes_back_while_its_compile_runs_waits_for_it(registry):
    skill = declare(registry, rid="r1").skill
    registry.retire("policy", NS)
    again = declare(registry, rid="r2")
    assert (again.outcome, again.skill, skill.rid) == ("exists", skill, "r1")
    assert registry.compiled("r1").state is State.READY


def test_evicted_content_declared_again_keeps_its_number(registry):
    skill = ready(registry)
    registry.evicted(skill.number)
    version = registry.version
    again = declare(registry, rid="r2")
    assert (again.outcome, again.skill, skill.rid) == ("compile", skill, "r2")
    assert registry.version == version


def test_names_of_two_namespaces_are_two_skills(registry):
    mine, other = ready(registry), ready(registry, content=text(2), namespace=OTHER)
    assert registry.get("policy", NS) is mine
    assert registry.get("policy", OTHER) is other
    assert registry.listed(NS) == [mine]


def test_own_skill_hides_the_shared_one_of_that_name(registry):
    shared = ready(registry, namespace=SHARED)
    assert registry.get("policy", NS) is shared
    own = ready(registry, content=text(2))
    assert registry.get("policy", NS) is own
    assert registry.get("policy", OTHER) is shared
    assert registry.listed(NS) == [shared, own]


def test_the_caller_may_reuse_its_arrays(registry):
    content = text(1)
    skill = ready(registry, content=content)
    content[0] = 99
    assert skill.segment.token_ids == text(1)


def test_a_new_seam_or_pin_needs_no_replace_but_new_plans(registry):
    skill = ready(registry)
    version = registry.version
    declare(registry, seam=5, pin=True)
    assert (skill.segment.seam, skill.pin, skill.segment.number) == (5, True, 1)
    assert registry.version > version


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"content": ids()}, "at least 1 token"),
        ({"name": "a/b"}, "kvedit: name"),
        ({"seam": 21}, "kvedit: seam"),
    ],
)
def test_bad_declarations_leave_nothing_behind(registry, changes, message):
    with pytest.raises(BadRequest, match=message):
        declare(registry, **changes)
    assert registry.all() == [] and registry.version == 0


def test_a_request_id_in_flight_cannot_be_announced_twice(registry):
    declare(registry, rid="r1")
    with pytest.raises(Conflict, match="r1"):
        declare(registry, "second", rid="r1")
    assert [s.segment.name for s in registry.all()] == ["policy"]


# ---- compile ends


def test_a_first_compile_that_fails_leaves_a_failed_skill(registry):
    skill = declare(registry, rid="r1").skill
    version = registry.version
    registry.failed("r1", "pool too small")
    assert (skill.state, skill.failed_reason) == (State.FAILED, "pool too small")
    assert skill.failed_reason == "pool too small"
    assert registry.matchable(NS) == [] and registry.version > version
    again = declare(registry, rid="r2")
    assert (again.outcome, again.skill) == ("compile", skill)
    assert registry.compiled("r2").failed_reason is None


def test_a_recompile_that_fails_leaves_the_skill_evicted_and_matchable(registry):
    skill = ready(registry)
    registry.evicted(1)
    assert registry.recompile(1, "r2") == "compile"
    registry.failed("r2", "aborted")
    assert (skill.state, skill.failed_reason) == (State.EVICTED, "aborted")
    assert registry.matchable(NS) == [skill]


@pytest.mark.parametrize("is_done", [True, False])
def test_a_compile_that_broke_at_its_end_is_as_one_that_failed(registry, is_done):
    """Whether or not it was noted as compiled before something else went wrong."""
    skill = declare(registry, rid="r1").skill
    if is_done:
        registry.compiled("r1")
    registry.broken(skill, "why")
    assert (skill.state, skill.failed_reason, skill.rid) == (State.FAILED, "why", None)
    assert registry.matchable(NS) == [] and registry.by_rid("r1") is None
    declare(registry, rid="r2")
    assert registry.compiled("r2") is skill and skill.state is State.READY
    registry.evicted(1)
    registry.recompile(1, "r3")
    if is_done:
        registry.compiled("r3")
    registry.broken(skill, "again")
    assert (skill.state, skill.failed_reason) == (State.EVICTED, "again")
    assert registry.matchable(NS) == [skill]


def test_only_a_ready_skill_breaks_behind_its_compile(registry):
    skill = ready(registry)
    registry.retire("policy", NS)
    registry.broken(skill, "why")
    assert skill.state is State.RETIRED


@pytest.mark.parametrize("move", ["compiled", "failed"])
def test_an_unknown_request_id_is_not_found(registry, move):
    with pytest.raises(NotFound, match="nobody"):
        getattr(registry, move)("nobody", *(["why"] if move == "failed" else []))


def test_recompile_tells_what_stands_in_its_way(registry):
    skill = declare(registry, rid="r1").skill
    assert registry.recompile(1, "r2") == "busy"
    registry.compiled("r1")
    assert registry.recompile(1, "r2") == "ready"
    registry.retire("policy", NS)
    assert registry.recompile(1, "r2") == "gone"
    assert registry.recompile(77, "r2") == "gone"
    assert skill.rid is None and registry.by_rid("r2") is None


# ---- losing KV


def test_eviction_keeps_the_skill_matchable_and_drops_its_pin(registry):
    skill = ready(registry)
    skill.pinned = True
    version = registry.version
    registry.evicted(1)
    assert (skill.state, skill.pinned) == (State.EVICTED, False)
    assert registry.matchable(NS) == [skill] and registry.version == version
    registry.evicted(99)  # dropped while the report was under way


def test_a_compile_that_began_before_a_flush_does_not_make_ready(registry):
    done, running = ready(registry), declare(registry, "second", text(2), rid="r2").skill
    registry.evict_all()
    assert done.state is State.EVICTED
    assert registry.by_rid("r2") is running
    assert registry.compiled("r2").state is State.EVICTED
    assert registry.recompile(running.number, "r3") == "compile"
    assert registry.compiled("r3").state is State.READY


def test_new_weights_give_new_numbers_and_identities_and_drop_the_retired(registry):
    """A path cached under an old number holds KV of the old weights: none may be found again."""
    ready(registry, content=text(2))
    skill = ready(registry, replace=True)
    before, version = skill.segment, registry.version
    registry.new_epoch("host, epoch 1")
    assert registry.all() == [skill] and skill.state is State.EVICTED
    assert (skill.number, registry.by_number(before.number)) == (3, None)
    assert skill.segment.identity != before.identity
    assert skill.segment.version == before.version and registry.version > version
    found = registry.matcher.find(text(1), NS, lambda a, b: "")
    assert [m.number for m in found] == [3]
    assert [s.number for s in registry.drain_dropped()] == [1]


def test_a_compile_under_old_weights_does_not_make_ready(registry):
    skill = declare(registry, rid="r1").skill
    registry.new_epoch("host, epoch 1")
    assert registry.compiled("r1") is skill and skill.state is State.EVICTED


def test_an_untrusted_segment_gets_a_new_number_and_keeps_its_identity(registry):
    skill, other = ready(registry), ready(registry, "other", text(2))
    before = skill.segment
    registry.renumber(before.number)
    assert (skill.number, skill.state, other.state) == (3, State.EVICTED, State.READY)
    assert skill.segment.identity == before.identity
    assert registry.get("policy", NS) is skill and registry.by_number(before.number) is None
    registry.renumber(99)  # gone meanwhile


# ---- leaving


def test_retire_takes_the_name_away_but_not_the_segment(registry):
    skill = ready(registry)
    version = registry.version
    assert registry.retire("policy", NS) is skill
    assert skill.state is State.RETIRED
    with pytest.raises(NotFound, match="policy"):
        registry.get("policy", NS)
    assert registry.by_number(1) is skill
    assert registry.matchable(NS) == [skill] and registry.version == version
    with pytest.raises(NotFound):
        registry.retire("policy", NS)


def test_a_client_cannot_remove_the_shared_skill_of_that_name(registry):
    ready(registry, namespace=SHARED)
    for remove in (registry.retire, registry.purge):
        with pytest.raises(NotFound):
            remove("policy", NS)
    assert registry.get("policy", NS).state is State.READY


def test_retired_during_its_compile_it_stays_retired(registry):
    skill = declare(registry, rid="r1").skill
    registry.retire("policy", NS)
    assert registry.by_rid("r1") is skill
    assert registry.compiled("r1").state is State.RETIRED


def test_purged_during_its_compile_the_request_is_still_known(registry):
    skill = declare(registry, rid="r1").skill
    registry.purge("policy", NS)
    assert registry.by_rid("r1") is skill
    assert registry.compiled("r1").state is State.RETIRED
    assert registry.all() == []


def test_purge_drops_every_version_of_the_name_and_no_other(registry):
    ready(registry)
    ready(registry, content=text(2), replace=True)
    kept = ready(registry, "other", text(3))
    version = registry.version
    assert [s.number for s in registry.purge("policy", NS)] == [1, 2]
    assert registry.all() == [kept] and registry.version > version
    assert registry.drain_dropped() == []
    with pytest.raises(NotFound):
        registry.purge("policy", NS)


def test_numbers_are_never_used_again(registry):
    ready(registry)
    registry.purge("policy", NS)
    assert ready(registry).number == 2


def test_a_failed_skill_is_dropped_rather_than_retired(registry):
    declare(registry, rid="r1")
    registry.failed("r1", "no room")
    ready(registry, content=text(2), replace=True)
    assert [s.number for s in registry.all()] == [2]
    assert [s.number for s in registry.drain_dropped()] == [1]


def test_retired_beyond_the_limit_leave_least_recently_used_first():
    registry = Registry("host", retired_max=2)
    for i in range(1, 5):
        ready(registry, f"skill{i}", text(i))
    registry.touch(1)
    for i in range(1, 4):
        registry.retire(f"skill{i}", NS)
    assert [s.number for s in registry.drain_dropped()] == [2]
    assert registry.drain_dropped() == []
    assert registry.by_number(2) is None
    assert registry.by_number(1).num_uses == 1
    registry.touch(2)  # a request that was planned before


def test_with_no_retired_kept_a_replaced_segment_leaves_at_once():
    registry = Registry("host", retired_max=0)
    ready(registry)
    ready(registry, content=text(2), replace=True)
    assert [s.number for s in registry.drain_dropped()] == [1]


# ---- the matcher follows


def test_the_matcher_gets_the_decoded_edge_of_the_skill():
    registry = Registry("host", retired_max=4, decode=lambda a: "".join(f"<{t}>" for t in a))
    ready(registry)
    prompt = ids(5) + text(1)[2:]
    found = registry.matcher.find(prompt, NS, lambda a, b: "said <1000><1001>")
    assert [(m.skill_start, m.prompt_start, m.num_tokens) for m in found] == [(2, 1, 18)]
    assert registry.matcher.find(prompt, NS, lambda a, b: "said <1000>") == []


moves = st.lists(
    st.tuples(
        st.sampled_from(
            ["declare", "replace", "compiled", "failed", "broken", "evicted", "retire"]
            + ["recompile", "purge", "evict_all", "epoch", "renumber", "touch"]
        ),
        st.integers(0, 2),
        st.integers(1, 3),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(moves)
def test_whatever_happens_the_books_agree(steps):
    """Matcher, version, numbers and request ids stay consistent under any sequence of moves."""
    registry, rids, ever = Registry("host", retired_max=2), iter(range(10**6)), set()
    for move, which, seed in steps:
        matchable, version = matchable_numbers(registry), registry.version
        present = {s.number for s in registry.all()}
        try:
            _move(registry, move, f"skill{which}", seed, str(next(rids)))
        except (Conflict, NotFound):
            assert matchable_numbers(registry) == matchable
        if matchable_numbers(registry) != matchable:
            assert registry.version > version
        now = {s.number for s in registry.all()}
        assert not (now - present) & ever  # a number that left never comes back
        ever |= now
        assert {n for n in ever if n in registry.matcher} == matchable_numbers(registry)
        assert [s.number for s in registry.all()] == sorted(now)
        assert sum(s.state is State.RETIRED for s in registry.all()) <= 2
        for skill in registry.all():
            if skill.state is State.COMPILING:
                assert skill.rid is not None
            assert skill.rid is None or registry.by_rid(skill.rid) is skill


def matchable_numbers(registry):
    return {s.number for s in registry.all() if s.matchable}


def _move(registry, move, name, seed, rid):
    flying = sorted(s.rid for s in registry.all() if s.rid is not None)
    if move in ("declare", "replace"):
        declare(registry, name, text(seed), rid=rid, replace=move == "replace")
    elif move == "compiled" and flying:
        registry.compiled(flying[0])
    elif move == "failed" and flying:
        registry.failed(flying[0], "why")
    elif move == "broken":
        registry.broken(registry.get(name, NS), "why")
    elif move == "evicted":
        registry.evicted(seed)
    elif move == "recompile":
        registry.recompile(seed, rid)
    elif move == "retire":
        registry.retire(name, NS)
    elif move == "purge":
        registry.purge(name, NS)
    elif move == "evict_all":
        registry.evict_all()
    elif move == "epoch":
        registry.new_epoch(rid)
    elif move == "renumber":
        registry.renumber(seed)
    elif move == "touch":
        registry.touch(seed)


# ---- checks of input


@pytest.mark.parametrize("name", ["a", "x" * 200, "refund policy v2", "política", "a.b-c_d:e"])
def test_good_names(name):
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name",
    ["", "x" * 201, "x" * 10_000, "a/b", "a\\b", "..", "a..b", ".", "a\0b", "a\nb", "\x7f"]
    + [" a", "a ", "\ud800", "\u202e", None, 7, b"a", ["a"]],
)
def test_bad_names(name):
    with pytest.raises(BadRequest, match="^kvedit: name: expected") as refused:
        check_name(name)
    assert len(str(refused.value)) < 200


def test_good_ids():
    assert check_ids([0, 9], vocab_size=10, max_len=2) == ids(0, 9)
    assert check_ids(ids(3), vocab_size=10, max_len=2) == ids(3)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "expected 1 to 3 tokens, got 0"),
        ([1, 2, 3, 4], "expected 1 to 3 tokens, got 4"),
        ([1, -1], r"input_ids\[1\]: expected an int in \[0, 10\), got -1"),
        ([10], r"input_ids\[0\]"),
        ([True], r"input_ids\[0\]"),
        ([1.0], r"input_ids\[0\]"),
        (["1"], r"input_ids\[0\]"),
        ([None], r"input_ids\[0\]"),
        ([10**5000], "an integer of 16610 bits"),
        ("12", "expected a list of ints, got str"),
        (None, "expected a list of ints, got NoneType"),
        ({1: 2}, "expected a list of ints, got dict"),
    ],
)
def test_bad_ids(value, message):
    with pytest.raises(BadRequest, match=message):
        check_ids(value, vocab_size=10, max_len=3)


def test_seams():
    assert [check_seam(s, 5) for s in (None, 0, 5)] == [None, 0, 5]
    for seam in (-1, 6, True, 1.0, "1", 10**5000):
        with pytest.raises(BadRequest, match="kvedit: seam: expected an integer in"):
            check_seam(seam, 5)
