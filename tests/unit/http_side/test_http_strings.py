"""Strings of a request: no lone surrogate gets in, ids have a bound, a server at rest is stock."""

from __future__ import annotations

from typing import Any

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput

from kvedit.errors import BadRequest
from sglang_patches.http.request import strings
from sglang_patches.http.request.strings import (
    MAX_CONTAINERS,
    MAX_DEPTH,
    MAX_ID_CHARS,
    check_strings,
)

LONE = "a\ud800"


def check(*, is_used: bool = True, **fields: Any) -> None:
    check_strings(GenerateReqInput(**{"text": "hi", **fields}), is_used=is_used)


NESTED: Any = {"custom_params": {"mine": [{"x": LONE}]}}


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"rid": LONE}, "rid"),
        ({"rid": ["fine", LONE]}, "rid[1]"),
        ({"cache_salt": LONE}, "cache_salt"),
        ({"cache_salt": ["fine", LONE]}, "cache_salt[1]"),
        ({"extra_key": ["fine", LONE]}, "extra_key[1]"),
        ({"session_id": LONE}, "session_id"),
        ({"session_params": {"id": LONE}}, "session_params['id']"),
        ({"lora_path": LONE}, "lora_path"),
        ({"lora_id": [None, LONE]}, "lora_id[1]"),
        ({"routing_key": LONE}, "routing_key"),
        ({"conversation_id": LONE}, "conversation_id"),
        ({"custom_labels": {LONE: "x"}}, "a key of custom_labels"),
        ({"sampling_params": NESTED}, "sampling_params['custom_params']['mine'][0]['x']"),
        ({"sampling_params": [{}, {"stop": [LONE]}]}, "sampling_params[1]['stop'][0]"),
        ({"sampling_params": {"stop": ["a", "\ud83d", "\ude00"]}}, "sampling_params['stop'][1]"),
        (
            {"sampling_params": {"a": {"b": [7, {LONE: 1}]}}},
            "a key of sampling_params['a']['b'][1]",
        ),
    ],
)
def test_a_lone_surrogate_is_refused_where_it_stands(fields: dict[str, Any], where: str) -> None:
    with pytest.raises(BadRequest) as error:
        check(**fields)
    assert str(error.value) == f"{where}: expected valid Unicode, got a lone surrogate"
    check(is_used=False, **fields)


@pytest.mark.parametrize("name", ["rid", "cache_salt", "extra_key", "session_id"])
def test_ids_have_a_bound(name: str) -> None:
    check(**{name: "\u00e9" * MAX_ID_CHARS})
    with pytest.raises(BadRequest, match=f"{name}: expected at most 512 characters, got 513"):
        check(**{name: "a" * (MAX_ID_CHARS + 1)})


def test_a_value_nested_without_end_is_refused() -> None:
    deep: Any = "x"
    for _ in range(MAX_DEPTH + 1):
        deep = [deep]
    with pytest.raises(BadRequest, match="levels"):
        check(sampling_params={"custom_params": deep})


def test_lists_and_objects_are_counted_and_numbers_are_not() -> None:
    check(sampling_params={"custom_params": {"x": [1] * (4 * MAX_CONTAINERS)}})
    check(sampling_params={"logit_bias": {str(i): 1.0 for i in range(2 * MAX_CONTAINERS)}})
    room = MAX_CONTAINERS - 3  # the two objects and the list around them
    check(sampling_params={"custom_params": {"x": [[]] * room}})
    for many in ([[]] * (room + 1), [[[]] * (room // 2), [{}] * (room // 2)]):
        with pytest.raises(BadRequest, match=r"sampling_params: expected at most 32768 lists and"):
            check(sampling_params={"custom_params": {"x": many}})


def test_no_place_is_spelled_but_the_one_of_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much stands in front of it: spelling is what costs."""
    spelled = []
    path = strings._path
    monkeypatch.setattr(strings, "_path", lambda *a: spelled.append(path(*a)) or spelled[-1])
    params: Any = {"custom_params": {"x": [["a", 1]] * 1000}}
    check(sampling_params=params)
    assert spelled == []
    params["custom_params"]["x"] = [*params["custom_params"]["x"], ["a", LONE]]
    with pytest.raises(BadRequest, match="lone surrogate"):
        check(sampling_params=params)
    assert spelled == ["sampling_params['custom_params']['x'][1000][1]"]


def test_everything_else_passes() -> None:
    check(
        rid=["a", "\U0001f600"],
        cache_salt="s",
        sampling_params={"n": 1, "stop": ["\u2028"], "custom_params": {"a": None, "b": [1.5]}},
    )
