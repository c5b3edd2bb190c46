"""What the fields of a generate request mean for its options, item by item."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput

from kvedit.errors import BadRequest
from kvedit.request.options import Options, from_wire
from sglang_patches.http.request.wishes import options_on_the_way, settled

ZERO = {"max_new_tokens": 0}


def options(*, is_exact: bool = False, **fields: Any) -> list[Options]:
    """The options of each prompt as the scheduler will read them."""
    obj = GenerateReqInput(**{"text": "a", **fields})
    obj.sampling_params = settled(obj, is_exact=is_exact)
    num = 1 if isinstance(obj.text, str) else len(obj.text)
    return [options_on_the_way(obj, item) for item in range(num)]


@pytest.mark.parametrize(
    ("fields", "exact"),
    [
        ({}, False),
        ({"return_logprob": True}, False),
        ({"return_logprob": True, "logprob_start_len": -1}, False),
        ({"return_logprob": True, "logprob_start_len": 0}, True),
        ({"logprob_start_len": 0}, False),
        ({"return_logprob": True, "logprob_start_len": 5}, True),
        ({"sampling_params": ZERO}, False),
        ({"sampling_params": ZERO, "return_logprob": True}, True),
    ],
)
def test_scoring_is_exact_and_logprobs_of_the_answer_are_not_scoring(
    fields: dict[str, Any], exact: bool
) -> None:
    [found] = options(**fields)
    assert found.exact is exact
    assert found.sealed.wants_nothing is ("sampling_params" in fields)


def test_each_prompt_of_a_batch_is_looked_at() -> None:
    fields = {"return_logprob": [True, False, True], "logprob_start_len": [0, 0, -1]}
    found = options(text=["a", "b", "c"], **fields)
    assert [one.exact for one in found] == [True, False, False]
    params = [ZERO, {}, {"custom_params": {"kvedit": {"seam": 3}}}]
    found = options(text=["a", "b", "c"], sampling_params=params, return_logprob=True)
    assert [(one.exact, one.seam) for one in found] == [(True, None), (False, None), (False, 3)]
    one_for_all = options(text=["a", "b"], sampling_params=ZERO, return_logprob=True)
    assert [one.exact for one in one_for_all] == [True, True]


def test_a_server_or_a_route_may_want_everything_exact() -> None:
    assert options(is_exact=True)[0].exact


def test_where_prompt_ids_are_returned_nothing_is_edited() -> None:
    [found] = options(return_prompt_token_ids=True)
    assert (found.edits, found.exact, found.splice) == ("off", False, "auto")


REQUIRE_SPLICE = {"splice": "require", "skills": ["a"]}
REQUIRE_EDITS = {"edits": "require"}


@pytest.mark.parametrize(
    ("said", "fields", "path"),
    [
        (REQUIRE_SPLICE, {"return_logprob": True, "logprob_start_len": 0}, "splice"),
        (REQUIRE_EDITS, {"return_logprob": True, "logprob_start_len": 0}, "edits"),
        (REQUIRE_SPLICE, {"is_exact": True}, "splice"),
        (REQUIRE_EDITS, {"return_prompt_token_ids": True}, "edits"),
    ],
)
def test_what_cannot_be_had_together_is_refused(
    said: dict[str, Any], fields: dict[str, Any], path: str
) -> None:
    with pytest.raises(BadRequest, match=f"custom_params.kvedit.{path}: expected"):
        options(sampling_params={"custom_params": {"kvedit": said}}, **fields)


def test_a_splice_may_be_required_where_prompt_ids_are_returned() -> None:
    params = {"custom_params": {"kvedit": REQUIRE_SPLICE}}
    assert options(sampling_params=params, return_prompt_token_ids=True)[0].splice == "require"


def test_a_plain_request_passes_as_it_came_and_what_was_not_asked_is_marked() -> None:
    for params in (None, {}, {"temperature": 0}, {"custom_params": {"mine": 1}}):
        assert settled(GenerateReqInput(text="a", sampling_params=params), is_exact=False) is params
    assert options(sampling_params=ZERO)[0].sealed.unasked
    said = {**ZERO, "custom_params": {"kvedit": {}}}
    assert not options(sampling_params=said)[0].sealed.unasked


def test_the_wire_form_is_text_and_the_clients_dicts_stay() -> None:
    params = {**ZERO, "custom_params": {"mine": 1, "kvedit": {"report": True}}}
    before = json.dumps(params)
    sent = settled(GenerateReqInput(text="a", sampling_params=params), is_exact=False)
    assert json.dumps(params) == before
    assert sent["custom_params"]["mine"] == 1
    assert from_wire(sent["custom_params"]["kvedit"]).report


def test_a_client_cannot_say_what_only_this_process_knows() -> None:
    params = {"custom_params": {"kvedit": {"sealed": {"wants_nothing": True}}}}
    with pytest.raises(BadRequest, match="only the keys"):
        options(sampling_params=params)


def test_samples_that_want_nothing_have_a_name_by_which_the_warmer_is_told() -> None:
    both = options(text=["a", "b"], sampling_params={**ZERO, "n": 2})
    names = [one.sealed.samples for one in both]
    assert None not in names and names[0] != names[1]
    for params in ({**ZERO}, {"n": 2}, {**ZERO, "n": 1}):
        assert options(sampling_params=params)[0].sealed.samples is None
