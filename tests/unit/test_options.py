"""custom_params.kvedit: what is accepted, and that a refusal names the path."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvedit.errors import BadRequest
from kvedit.request.options import DEFAULT, Options, Sealed, from_wire, parse_options
from kvedit.request.strategy import STRATEGIES


@pytest.mark.parametrize("value", [None, {}, "{}", {"splice": "auto", "skills": None}])
def test_nothing_asked_for_is_the_default(value):
    assert parse_options(value) == DEFAULT == Options(splice="auto", skills=None, seam=None)


def test_an_object_and_its_json_mean_the_same():
    value = {"splice": "require", "skills": ["b", "a"], "seam": 4}
    expected = Options(splice="require", skills=("b", "a"), seam=4)
    assert parse_options(value) == parse_options(json.dumps(value)) == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"seam": -1}, "custom_params.kvedit.seam: expected an integer >= 0, got -1"),
        ({"seam": True}, "custom_params.kvedit.seam: expected an integer >= 0, got true"),
        ({"seam": 1.5}, "custom_params.kvedit.seam: expected an integer >= 0, got 1.5"),
        ({"seam": "1"}, 'custom_params.kvedit.seam: expected an integer >= 0, got "1"'),
        ({"seam": 10**5000}, "custom_params.kvedit.seam: expected an integer >= 0, got a huge"),
        (
            {"splice": "on"},
            'custom_params.kvedit.splice: expected one of auto, off, require, got "',
        ),
        ({"splice": None}, "custom_params.kvedit.splice: expected one of auto, off, require"),
        ({"splice": ["off"]}, "custom_params.kvedit.splice: expected one of"),
        (
            {"skills": "policy"},
            'custom_params.kvedit.skills: expected a list of names, got "policy"',
        ),
        ({"skills": ["a", 7]}, "custom_params.kvedit.skills[1]: expected a name"),
        ({"skills": [""]}, "custom_params.kvedit.skills[0]: expected a name"),
        ({"skills": ["x" * 201]}, "custom_params.kvedit.skills[0]: expected a name"),
        (
            {"skills": ["a"] * 257},
            "custom_params.kvedit.skills: expected at most 256 names, got 257",
        ),
        (
            {"splice": "require"},
            'custom_params.kvedit.skills: expected at least one name with splice "require", '
            "got nothing",
        ),
        (
            {"splice": "require", "skills": []},
            'custom_params.kvedit.skills: expected at least one name with splice "require", '
            "got nothing",
        ),
        (
            {"op": "register"},
            "custom_params.kvedit: expected only the keys conversation, edits, exact, "
            'repair, report, seam, skills, splice, strategy, topk, got "op"',
        ),
        ({7: 1}, "splice, strategy, topk, got 7"),
        (
            {"edits": "on"},
            'custom_params.kvedit.edits: expected one of auto, off, require, got "on"',
        ),
        ({"edits": None}, "custom_params.kvedit.edits: expected one of auto, off, require"),
        (
            {"strategy": "patch"},
            "custom_params.kvedit.strategy: expected one of recompute, erratum",
        ),
        ({"strategy": ["edit"]}, "custom_params.kvedit.strategy: expected one of recompute"),
        ({"conversation": ""}, "custom_params.kvedit.conversation: expected true or a string of"),
        (
            {"conversation": "c" * 129},
            "custom_params.kvedit.conversation: expected true or a string",
        ),
        ({"conversation": 5}, "custom_params.kvedit.conversation: expected true or a string of"),
        ({"conversation": "\ud800"}, "custom_params.kvedit.conversation: expected valid Unicode"),
        ({"repair": -1}, "custom_params.kvedit.repair: expected an integer in [0, 4096], got -1"),
        ({"repair": True}, "custom_params.kvedit.repair: expected an integer in [0, 4096], got tr"),
        ({"repair": 4097}, "custom_params.kvedit.repair: expected an integer in [0, 4096], got 40"),
        ({"topk": 2.0}, "custom_params.kvedit.topk: expected an integer in [0, 4096], got 2.0"),
        ({"conversation": False}, "custom_params.kvedit.conversation: expected true or a string"),
        ({"exact": 1}, "custom_params.kvedit.exact: expected true or false, got 1"),
        ({"report": "yes"}, 'custom_params.kvedit.report: expected true or false, got "yes"'),
        ({"exact": True, "edits": "require"}, 'exact: expected false with "require", got true'),
        ({"skills": ["a", "\ud800"]}, "custom_params.kvedit.skills[1]: expected valid Unicode"),
        ({"sealed": {}}, "custom_params.kvedit: expected only the keys conversation"),
        ([], "custom_params.kvedit: expected an object, got list"),
        (7, "custom_params.kvedit: expected an object, got 7"),
        (False, "custom_params.kvedit: expected an object, got false"),
        ("", "custom_params.kvedit: expected an object or JSON text of one, got text that"),
        ("kvedit:{}", "custom_params.kvedit: expected an object or JSON text of one, got"),
        ("null", "custom_params.kvedit: expected an object, got NoneType"),
        ("[1]", "custom_params.kvedit: expected an object, got list"),
        ('"{}"', "custom_params.kvedit: expected an object, got JSON text of a string"),
        ("[" * 100_000, "custom_params.kvedit: expected an object or JSON text of one, got"),
        (
            '{"seam": ' + "9" * 6000 + "}",
            "custom_params.kvedit: expected an object or JSON text of one, got",
        ),
    ],
)
def test_refusals_name_the_path_and_stay_short(value, message):
    with pytest.raises(BadRequest, match=re.escape(message)) as refused:
        parse_options(value)
    assert len(str(refused.value)) < 250


TOKEN = "kvc-" + "5e" * 16


@pytest.mark.parametrize(
    "value",
    [
        TOKEN,
        json.dumps(TOKEN),
        '{"conversation": "' + TOKEN + '",}',
        {TOKEN: True},
        {"conversation": "Bearer " + TOKEN + "x" * 128},
        {"conversation": [TOKEN]},
        [TOKEN],
    ],
)
def test_no_refusal_tells_a_token_for_errors_are_logged(value):
    with pytest.raises(BadRequest, match="expected") as refused:
        parse_options(value)
    assert "5e5e" not in str(refused.value)


names = st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=20)


@given(
    st.sampled_from(["auto", "off", "require"]),
    st.none() | st.lists(names, min_size=1, max_size=5).map(tuple),
    st.none() | st.integers(0, 2**31 - 1),
    st.fixed_dictionaries(
        {
            "edits": st.sampled_from(["auto", "off", "require"]),
            "strategy": st.none() | st.sampled_from(STRATEGIES),
            "conversation": st.none() | st.just(True) | names,
            "report": st.booleans(),
            "sealed": st.builds(
                Sealed,
                proof=st.none() | names,
                is_issued=st.booleans(),
                wants_nothing=st.booleans(),
            ),
            "repair": st.none() | st.integers(0, 4096),
            "topk": st.none() | st.integers(0, 4096),
        }
    ),
)
def test_json_is_canonical_and_reads_back(splice, skills, seam, edits):
    if splice == "require" and skills is None:
        skills = ("any",)
    options = Options(splice=splice, skills=skills, seam=seam, **edits)
    again = from_wire(options.to_json())
    assert again == options and again.to_json() == options.to_json()
