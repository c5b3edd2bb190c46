"""What a generate request asks of kvedit: its options, and what its other fields mean for them.

Decided here, for the scheduler no longer sees it: the host's own warmer of n > 1 samples asks for
zero tokens with logprobs just like a client that scores.
"""

from __future__ import annotations

import dataclasses
import secrets
from typing import Any

from kvedit.errors import BadRequest
from kvedit.request.options import PATH, Options, from_wire, parse_options
from sglang_patches.host.protocols import GenerateRequest

KEY = "kvedit"


def settled(obj: GenerateRequest, *, is_exact: bool) -> Any:
    """``obj.sampling_params`` (None, one or a list) with the options of each prompt in wire form.

    They go on as one JSON string: a nested object kills the scheduler under msgpack IPC. What the
    caller passed is never changed, n samples and other requests may share it; where nothing is to
    be said it is passed on as it came. One becomes a list only where the host makes a batch.
    ``is_exact``: the server or the route wants exact KV only. Raises BadRequest.
    """
    given = obj.sampling_params
    if isinstance(given, list):
        return [_settled_one(obj, i, params, is_exact) for i, params in enumerate(given)]
    one = given or {}
    differ = isinstance(obj.return_logprob, list) or isinstance(obj.logprob_start_len, list)
    num_in_batch = _num_in_batch(obj, one)
    if num_in_batch and (differ or _warms_for_nothing(one)):
        return [_settled_one(obj, i, one, is_exact) for i in range(num_in_batch)]
    return _settled_one(obj, None, given, is_exact)


def options_on_the_way(obj: GenerateRequest, item: int) -> Options:
    """The options of prompt ``item`` as ``settled`` wrote them."""
    params = obj.sampling_params
    if isinstance(params, list):
        params = params[item]
    custom = (params or {}).get("custom_params") or {}
    return from_wire(custom.get(KEY))


def _settled_one(obj: GenerateRequest, item: int | None, params: Any, is_exact: bool) -> Any:
    custom = _custom_params(params)
    said = parse_options(custom.get(KEY))
    options = _with_meaning(said, obj, item, params or {}, is_exact)
    if KEY not in custom:
        if options == said:
            return params
        options = _sealed(options, unasked=True)
    return {**(params or {}), "custom_params": {**custom, KEY: options.to_json()}}


def _with_meaning(
    said: Options, obj: GenerateRequest, item: int | None, params: dict[str, Any], is_exact: bool
) -> Options:
    wants_nothing = params.get("max_new_tokens") == 0
    samples = secrets.token_hex(8) if _warms_for_nothing(params) else None
    options = _sealed(said, wants_nothing=wants_nothing, samples=samples)
    scores = bool(_of_item(obj.return_logprob, item)) and (
        wants_nothing or _from_prompt(_of_item(obj.logprob_start_len, item))
    )
    if is_exact or scores:
        _refuse_require(said, ("splice", "edits"), "exact KV only (it scores, or this server is)")
        options = dataclasses.replace(options, exact=True)
    if obj.return_prompt_token_ids:
        _refuse_require(said, ("edits",), "the ids of its prompt, which are those it sent")
        options = dataclasses.replace(options, edits="off")
    return options


def _refuse_require(said: Options, keys: tuple[str, ...], asked: str) -> None:
    for key in keys:
        if getattr(said, key) == "require":
            raise BadRequest(
                f'{PATH}.{key}: expected "auto" or "off" of a request that gets {asked}, '
                'got "require"'
            )


def _warms_for_nothing(params: dict[str, Any]) -> bool:
    """Whether the host's warmer and the samples it warms for look alike."""
    return params.get("max_new_tokens") == 0 and _has_samples(params)


def _sealed(options: Options, **what: Any) -> Options:
    return dataclasses.replace(options, sealed=dataclasses.replace(options.sealed, **what))


def _custom_params(params: Any) -> dict[str, Any]:
    custom = params.get("custom_params") if isinstance(params, dict) else None
    if custom is None:
        return {}
    if not isinstance(custom, dict):
        raise BadRequest(f"custom_params: expected an object, got {type(custom).__name__}")
    return custom


def _of_item(value: Any, item: int | None) -> Any:
    """A field of the host: one value for all prompts, or a list of one each (too short a list is
    for the host to refuse). None: a single request, whose list the host takes as it is."""
    if item is None or not isinstance(value, list):
        return value
    return value[item] if item < len(value) else None


def _from_prompt(logprob_start_len: Any) -> bool:
    """A list here is a single request's, for the host to refuse: taken for the careful answer."""
    if isinstance(logprob_start_len, list):
        return True
    return isinstance(logprob_start_len, int) and logprob_start_len >= 0


def num_prompts(obj: GenerateRequest) -> int:
    """As the host will count them; 0 of an empty list."""
    prompts = _prompts(obj)
    return 1 if prompts is None else len(prompts)


def _num_in_batch(obj: GenerateRequest, params: dict[str, Any]) -> int:
    """Prompts of what the host will make a batch: several prompts, or one that is sampled several
    times. 0: it will stay a single request, whose params must not become a list."""
    prompts = _prompts(obj)
    if prompts is None:
        return int(_has_samples(params))
    return len(prompts)


def _prompts(obj: GenerateRequest) -> Any:
    """The list of prompts that the host will see in ``obj``; None: it is one prompt."""
    if obj.text is not None:
        return None if isinstance(obj.text, str) else obj.text
    ids, embeds = obj.input_ids, obj.input_embeds
    if ids is not None:
        return ids if len(ids) and not isinstance(ids[0], int) else None
    if not embeds or not embeds[0]:
        return None
    return None if isinstance(embeds[0][0], float) else embeds


def _has_samples(params: dict[str, Any]) -> bool:
    """Whether the host will sample a prompt several times (beams are one request)."""
    n = params.get("n", 1)
    return isinstance(n, int) and n > 1 and (params.get("beam_width") or 1) <= 1
