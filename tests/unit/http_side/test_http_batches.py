"""The host makes of a request what it would make of it without our options, and each prompt's
options fit what the host then does with that prompt."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput

from kvedit.errors import BadRequest
from sglang_patches.http.request import conversation
from sglang_patches.http.request.wishes import KEY, options_on_the_way, settled

PROMPTS: list[dict[str, Any]] = [
    {"text": "a"},
    {"text": []},
    {"text": ["a"]},
    {"text": ["a", "b"]},
    {"input_ids": [1, 2]},
    {"input_ids": [[1], [2, 3]]},
    {"input_embeds": [[0.5], [0.5]]},
    {"input_embeds": [[[0.5]], [[0.5]]]},
]
NOT_SAID = object()


def one_params() -> Iterator[dict[str, Any]]:
    choices: dict[str, tuple[Any, ...]] = {
        "n": (NOT_SAID, 0, 1, 2),
        "max_new_tokens": (NOT_SAID, 0, 4),
        "beam_width": (NOT_SAID, 2),
    }
    yield {"custom_params": {"mine": 1, "kvedit": {"report": True}}}
    for values in itertools.product(*choices.values()):
        yield {k: v for k, v in zip(choices, values, strict=True) if v is not NOT_SAID}


def all_params() -> Iterator[Any]:
    yield None
    yield []
    for params in one_params():
        yield params
        yield [params]
        yield [params, {"n": params.get("n", 1), "max_new_tokens": 0}]


def all_requests() -> Iterator[dict[str, Any]]:
    logprobs = (None, True, [True], [False], [True, False])
    starts = (None, 0, [0], [0, -1])
    for params, logprob, start in itertools.product(all_params(), logprobs, starts):
        yield {"sampling_params": params, "return_logprob": logprob, "logprob_start_len": start}


def made(fields: dict[str, Any], is_exact: bool | None) -> tuple[GenerateReqInput, Any]:
    """What the host makes of it, and the error it ends with. is_exact None: without our part."""
    obj = GenerateReqInput(**copy.deepcopy(fields))
    if is_exact is not None:
        obj.sampling_params = settled(obj, is_exact=is_exact)
    try:
        obj.normalize_batch_and_arguments()
    except Exception as error:  # whatever the host raises is what a client would get
        return obj, (type(error), str(error))
    return obj, None


def without_ours(params: Any) -> Any:
    if isinstance(params, list):
        return [without_ours(one) for one in params]
    custom = {k: v for k, v in params.get("custom_params", {}).items() if k != KEY}
    others = {k: v for k, v in params.items() if k != "custom_params"}
    return {**others, "custom_params": custom} if custom else others


def wanted_exact(obj: GenerateReqInput, item: int) -> bool | None:
    """By the fields as the host reads them; None where its own lists are too short."""
    fields = obj.return_logprob, obj.logprob_start_len, obj.sampling_params
    if obj.is_single:
        scored, start, params = fields
    elif any(item >= len(field) for field in fields):
        return None
    else:
        scored, start, params = (field[item] for field in fields)
    if isinstance(start, list) or isinstance(params, list):
        return None  # of a single request: the host fails on it
    return bool(scored) and (params.get("max_new_tokens") == 0 or start >= 0)


@pytest.mark.parametrize("prompts", PROMPTS, ids=str)
def test_the_host_makes_of_a_request_what_it_makes_without_us(prompts: dict[str, Any]) -> None:
    num_made = 0
    for fields in all_requests():
        told = {**prompts, **fields}
        stock, stock_error = made(told, None)
        for is_exact in (False, True):
            obj, error = made(told, is_exact)
            assert error == stock_error, told
            if error is not None:
                continue
            num_made += 1
            for name in ("is_single", "batch_size", "parallel_sample_num", "return_logprob"):
                assert getattr(obj, name) == getattr(stock, name), (name, told)
            ours, theirs = without_ours(obj.sampling_params), without_ours(stock.sampling_params)
            assert ours == theirs, told
            for item in range(obj.batch_size):
                wanted = wanted_exact(obj, item)
                if wanted is not None:
                    exact = options_on_the_way(obj, item).exact
                    assert exact is (wanted or is_exact), (item, told)
    assert num_made > 500


def test_a_prompt_of_embeddings_is_one_and_a_list_of_them_several() -> None:
    params = {"custom_params": {"kvedit": {"conversation": True}}}
    one = GenerateReqInput(input_embeds=[[0.5], [0.5]], sampling_params=params)
    several = GenerateReqInput(input_embeds=[[[0.5]], [[0.5]]], sampling_params=params)
    for obj in (one, several):
        obj.sampling_params = settled(obj, is_exact=False)
    assert conversation.seal(one) is not None
    with pytest.raises(BadRequest, match="got 2 prompts"):
        conversation.seal(several)
