"""One real server with a random model: splice equals exact reuse on the device's own backend."""

from __future__ import annotations

import json
import os
import tempfile
import urllib.request
import uuid
from pathlib import Path
from typing import Any

VOCAB_SIZE = 1_000
SKILL = [7 + 13 * i % 900 for i in range(700)]
TAIL = [5, 6, 7]


def server_checks(*, on_gpu: bool, log_path: Path) -> list[dict[str, object]]:
    """Start ``--attention-backend flashinfer`` (a dry run: the CPU default), splice a skill at
    the start of a prompt without a seam, and compare every top logprob with exact reuse of the
    same tokens. Behind a prefix, the splice must be reported as composed."""
    from kvedit.workbench.server_process import ServerProcess

    flags = ["--attention-backend", "flashinfer"] if on_gpu else []
    env = {"HF_HUB_OFFLINE": "1"}
    os.environ.pop("TRITON_INTERPRET", None)  # of the dry run's kernels, not of a server
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        argv = ["--model-path", folder, "--max-total-tokens", "8192", *flags]
        with ServerProcess(argv, env=env, log_path=log_path) as url:
            return compare(url)


def compare(url: str) -> list[dict[str, object]]:
    post(url, "/kvedit/skills", {"name": "device-check", "input_ids": SKILL})
    spliced = generate(url, SKILL + TAIL, {"seam": 0})
    key = uuid.uuid4().hex
    generate(url, SKILL, {"splice": "off"}, extra_key=key)
    exact = generate(url, SKILL + TAIL, {"splice": "off"}, extra_key=key)
    moved = generate(url, [1, 2, 3] * 40 + SKILL + TAIL, {"seam": 0})
    same = logprobs(spliced) == logprobs(exact)
    return [
        {
            "check": "splice at the start equals exact reuse, bit for bit",
            "composed": composed(spliced),
            "passed": same and composed(spliced) == len(SKILL),
        },
        {
            "check": "splice behind 120 tokens",
            "composed": composed(moved),
            "passed": composed(moved) == len(SKILL),
        },
    ]


def generate(url: str, ids: list[int], kvedit: dict[str, Any], **fields: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
    sampling["custom_params"] = {"kvedit": kvedit}
    body = {"input_ids": ids, "sampling_params": sampling, **fields}
    return post(url, "/generate", body | {"return_logprob": True, "top_logprobs_num": 20})


def post(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url + path, data=json.dumps(body).encode(), method="POST")
    request.add_header("content-type", "application/json")
    with urllib.request.urlopen(request, timeout=120) as response:
        answer: dict[str, Any] = json.loads(response.read())
    return answer


def composed(answer: dict[str, Any]) -> int:
    return int(answer["meta_info"]["kvedit"][0]["composed"])


def logprobs(answer: dict[str, Any]) -> list[Any]:
    return [[step[:2] for step in steps] for steps in answer["meta_info"]["output_top_logprobs"]]


def make_model(folder: Path) -> None:
    """A small Llama with random weights and a word-level tokenizer, made without a network."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=0,
        dtype="bfloat16",
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    words = {f"w{i}": i for i in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w0").save_pretrained(folder)
