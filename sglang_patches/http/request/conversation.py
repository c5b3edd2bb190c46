"""Tokens that prove a conversation: made here, told to one client, known to nobody else.

A client asks for a token with ``"conversation": true`` and sends it back as
``"conversation": "<token>"``. Behind this module there are digests only, of tokens and of plain
names alike: the host logs and dumps what goes on to the scheduler.
"""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from kvedit.errors import BadRequest
from kvedit.request.options import PATH, Options, Sealed, from_wire
from sglang_patches.host.protocols import GenerateRequest
from sglang_patches.http.request.wishes import KEY, num_prompts

PREFIX = "kvc-"
TOKEN_BYTES = 16  # 128 random bits
# Names are short words: without the key, who reads a log could try them all.
_DIGEST_KEY = secrets.token_bytes(32)


def seal(obj: GenerateRequest, *, has_reports: bool = True) -> str | None:
    """Put digests in place of the names and tokens in the options of ``obj``, which stand there in
    wire form. Returns the token to hand out with the answer; None: none was asked for.

    Raises BadRequest for ``true`` with several prompts or samples, or where answers have no report
    that could carry a token.
    """
    params = obj.sampling_params
    options = [_options_of(one) for one in (params if isinstance(params, list) else [params])]
    if not any(one is not None and one.conversation is not None for one in options):
        return None
    token = None
    if any(one is not None and one.conversation is True for one in options):
        if not has_reports:
            raise BadRequest(
                f"{PATH}.conversation: expected a name from a server without reports "
                "(--kvedit-report off), got true"
            )
        _check_single(obj, options)
        token = PREFIX + secrets.token_hex(TOKEN_BYTES)
    if isinstance(params, list):
        pairs = zip(params, options, strict=True)
        obj.sampling_params = [_sealed(one, said, token) for one, said in pairs]
    else:
        obj.sampling_params = _sealed(params, options[0], token)
    return token


async def handed_out(
    outputs: AsyncGenerator[Any, None], token: str | None
) -> AsyncGenerator[Any, None]:
    """``outputs`` with the token in the report of the finished answer.

    The report there is a copy: the host keeps its own output for dumps.
    """
    async with aclosing(outputs):
        async for output in outputs:
            if token is None:
                yield output
            elif isinstance(output, list):
                yield [_with_token(one, token) for one in output]
            else:
                yield _with_token(output, token)


def digest_of(name: str) -> str:
    """32 hex digits. The same for a name as long as this process lives, and in no other one."""
    return hashlib.blake2b(name.encode(), key=_DIGEST_KEY, digest_size=16).hexdigest()


def _options_of(params: Any) -> Options | None:
    """None where there are none, so that what was sent without stays as it was."""
    custom = (params or {}).get("custom_params") or {}
    return from_wire(custom[KEY]) if KEY in custom else None


def _check_single(obj: GenerateRequest, options: list[Options | None]) -> None:
    params = obj.sampling_params
    several = [one for one in (params if isinstance(params, list) else [params]) if one]
    num_samples = max((one.get("n") or 1 for one in several), default=1)
    num = max(num_prompts(obj), len(options))
    if num != 1 or num_samples != 1:
        raise BadRequest(
            f"{PATH}.conversation: expected one prompt and n 1 with true, for a token is of one "
            f"conversation, got {num} prompts, n {num_samples}"
        )


def _sealed(params: Any, said: Options | None, token: str | None) -> Any:
    if said is None or said.conversation is None:
        return params
    is_issued = said.conversation is True
    name = token if said.conversation is True else said.conversation
    assert name is not None
    proof = digest_of(name)
    sealed: Sealed = dataclasses.replace(said.sealed, proof=proof, is_issued=is_issued)
    options = dataclasses.replace(said, conversation=proof, sealed=sealed)
    custom = {**params["custom_params"], KEY: options.to_json()}
    return {**params, "custom_params": custom}


def _with_token(output: Any, token: str) -> Any:
    meta = output["meta_info"]
    reports = meta.get(KEY)
    if not reports or meta.get("finish_reason") is None:
        return output
    report = {**reports[0], "conversation": token}
    return {**output, "meta_info": {**meta, KEY: [report, *reports[1:]]}}
