"""From a registration's text to checked token ids, and the prefix a skill is compiled behind."""

from __future__ import annotations

import asyncio
from typing import Any

from kvedit.checks import check_ids
from kvedit.errors import BadRequest
from sglang_patches.host.protocols import TokenizerManager


def compile_prefix(tokenizer: Any) -> list[int]:
    """[BOS] when the tokenizer puts one in front of a text, else [].

    Asked with the empty text: only its leading special token counts, never a trailing EOS.
    """
    if tokenizer is None:
        return []
    specials = list(tokenizer("", add_special_tokens=True).input_ids)
    bos = getattr(tokenizer, "bos_token_id", None)  # not every tokenizer class has one
    return [bos] if bos is not None and specials[:1] == [bos] else []


async def skill_ids(
    manager: TokenizerManager, text: str | None, input_ids: list[int] | None, *, num_prefix: int
) -> list[int]:
    """The ids of a skill, each within the vocabulary and few enough to be prefilled.

    A text is tokenised without special tokens, off the event loop. Raises BadRequest.
    """
    if input_ids is None:
        if manager.tokenizer is None:
            raise BadRequest("kvedit: text: expected input_ids, this server has no tokenizer")
        input_ids = await asyncio.get_running_loop().run_in_executor(
            None, lambda: list(manager.tokenizer(text, add_special_tokens=False).input_ids)
        )
    if not input_ids:
        raise BadRequest("kvedit: text: expected at least one token, got none")
    max_len = longest_prompt(manager) - num_prefix
    check_ids(input_ids, manager.model_config.vocab_size, max_len)
    return input_ids


def longest_prompt(manager: TokenizerManager) -> int:
    """Tokens that a prompt may have: room in the context and in the KV pool for one answer."""
    context = int(manager.context_len) - int(manager.num_reserved_tokens)
    return min(context, int(manager.max_req_input_len)) - 1
