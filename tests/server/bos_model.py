"""A tiny random Llama whose tokenizer puts a BOS in front of every text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

BOS = 1
NUM_LAYERS = 4


def make_bos_model(default_model_dir: Path, folder: Path) -> Path:
    """Write the model and the default model's tokenizer, which then adds BOS, into ``folder``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        bos_token_id=BOS,
        eos_token_id=2,
        tie_word_embeddings=True,
        initializer_range=0.2,  # large enough for attention to tell positions apart
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    shutil.copy(default_model_dir / "tokenizer_config.json", folder)
    tokenizer = json.loads((default_model_dir / "tokenizer.json").read_text("utf-8"))
    bos = tokenizer["added_tokens"][BOS]["content"]
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": bos, "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [
            {"SpecialToken": {"id": bos, "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
            {"Sequence": {"id": "B", "type_id": 1}},
        ],
        "special_tokens": {bos: {"id": bos, "ids": [BOS], "tokens": [bos]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    return folder
