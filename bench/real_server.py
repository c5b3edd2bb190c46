"""What the benches that need a real server share: token ids to send, and one timed request."""

from __future__ import annotations

import random
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kvedit.workbench.timed_request import Streamed, stream_generate

NOUNS = ("lamp", "rope", "cup", "tent", "bell", "coat", "drum", "flag", "jar", "key", "map", "net")
PLACES = ("attic", "barn", "cellar", "depot", "field", "garden", "harbour", "kitchen", "mill")


class TextIds:
    """Distinct, ordinary text as token ids: random ids would be unlike any prompt."""

    def __init__(self, model_path: Path) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(str(model_path))

    def encode(self, text: str) -> list[int]:
        """Token ids of `text` without special tokens."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def filler(self, seed: str, num_tokens: int) -> list[int]:
        """`num_tokens` ids of sentences; another seed differs within the first tokens."""
        rng = random.Random(seed)
        ids = self.encode(f"Record {rng.randrange(10**6)}.\n")
        while len(ids) < num_tokens:
            noun, place, number = rng.choice(NOUNS), rng.choice(PLACES), rng.randrange(1000)
            ids += self.encode(f"The {noun} number {number} is kept in the {place}.\n")
        return ids[:num_tokens]


def fresh_salt() -> str:
    """A cache salt that no request has used, hence an empty tree namespace."""
    return uuid.uuid4().hex


def generate(
    url: str,
    input_ids: Sequence[int],
    *,
    salt: str | None = None,
    options: dict[str, Any] | None = None,
    max_new_tokens: int = 1,
) -> Streamed:
    """One greedy request. `options` is custom_params["kvedit"], None sends none."""
    sampling: dict[str, Any] = {
        "temperature": 0,
        "max_new_tokens": max_new_tokens,
        "ignore_eos": True,
    }
    if options is not None:
        sampling["custom_params"] = {"kvedit": options}
    body: dict[str, Any] = {"input_ids": list(input_ids), "sampling_params": sampling}
    if salt is not None:
        body["cache_salt"] = salt
    return stream_generate(url, body)


def choose(
    url: str,
    input_ids: Sequence[int],
    choices: tuple[int, int],
    *,
    salt: str | None = None,
    options: dict[str, Any] | None = None,
) -> tuple[Streamed, float]:
    """One request for one token, and the log odds of ``choices[1]`` over ``choices[0]`` there."""
    sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
    if options is not None:
        sampling["custom_params"] = {"kvedit": options}
    body: dict[str, Any] = {
        "input_ids": list(input_ids),
        "sampling_params": sampling,
        "return_logprob": True,
        "token_ids_logprob": list(choices),
    }
    if salt is not None:
        body["cache_salt"] = salt
    streamed = stream_generate(url, body)
    (scored,) = streamed.meta_info["output_token_ids_logprobs"]
    logprobs = {token_id: logprob for logprob, token_id, *_ in scored}
    return streamed, logprobs[choices[1]] - logprobs[choices[0]]
