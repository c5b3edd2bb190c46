"""The ownership oracle sees every way a slot can go wrong."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvedit.splice.ownership import ownership_problems

GOOD = {"free": [4, 5, 6], "tree": [1, 2], "request a": [3], "request b": []}


def test_a_clean_pool_has_no_problem():
    assert ownership_problems(range(1, 7), GOOD) == []


@pytest.mark.parametrize(
    ("owner", "slots", "said"),
    [
        ("tree", [1], "1 slots have no owner: [2]"),
        ("tree", [1, 2, 3], "1 slots of request a are owned already: 3 (tree)"),
        ("tree", [1, 2, 2], "1 slots of tree are owned already: 2 (tree)"),
        ("request a", [3, 4], "1 slots of request a are owned already: 4 (free)"),
        ("request b", [0], "1 slots are not of this pool: [0]"),
        ("request b", [7], "1 slots are not of this pool: [7]"),
    ],
)
def test_each_fault_is_named(owner, slots, said):
    problems = ownership_problems(range(1, 7), GOOD | {owner: slots})
    assert any(said in problem for problem in problems), problems


@given(
    st.lists(st.sampled_from(["free", "tree", "request"]), min_size=1, max_size=30),
    st.data(),
)
def test_moving_adding_or_dropping_one_slot_is_always_seen(owners, data):
    held = {name: [i for i, o in enumerate(owners) if o == name] for name in set(owners)}
    pool = range(len(owners))
    assert ownership_problems(pool, held) == []
    name = data.draw(st.sampled_from(sorted(held)))
    damaged = {n: list(slots) for n, slots in held.items()}
    if data.draw(st.booleans()) and damaged[name]:
        damaged[name].pop()
    else:
        damaged[name].append(data.draw(st.integers(-1, len(owners))))
    assert ownership_problems(pool, damaged)


def test_a_long_list_is_shortened():
    [problem] = ownership_problems(range(100), {"free": []}, max_shown=3)
    assert problem == "100 slots have no owner: [0, 1, 2]"
