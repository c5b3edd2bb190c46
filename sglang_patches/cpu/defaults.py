"""Command-line defaults of a CPU host; a flag the user gave is never touched."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

MAX_DEFAULT_POOL_TOKENS = 65536
POOL_SHARE_OF_MEMORY = 0.25
FALLBACK_POOL_TOKENS = 16384
KV_DTYPE_BYTES = 2

FIXED_DEFAULTS: tuple[tuple[str, str | None], ...] = (
    ("--device", "cpu"),
    ("--attention-backend", "torch_native"),
    ("--sleep-on-idle", None),
    ("--chunked-prefill-size", "2048"),
)
"""(flag, value); None marks a switch. Reasons stand in `adaptations`."""


def with_cpu_defaults(argv: Sequence[str]) -> list[str]:
    """`argv` plus every CPU default whose flag the user did not give, in both spellings."""
    result = list(argv)
    for flag, value in FIXED_DEFAULTS:
        if not gives_flag(argv, flag):
            result += [flag] if value is None else [flag, value]
    if not gives_flag(argv, "--max-total-tokens"):
        result += ["--max-total-tokens", str(default_pool_tokens(value_of_model(argv)))]
    return result


def gives_flag(argv: Sequence[str], flag: str) -> bool:
    """Whether `argv` sets `flag`, as `--flag value` or `--flag=value`."""
    return any(arg == flag or arg.startswith(flag + "=") for arg in argv)


def value_of_model(argv: Sequence[str]) -> str | None:
    """The value of `--model-path` (or its alias `--model`), None when absent."""
    for position, arg in enumerate(argv):
        name, has_equals, value = arg.partition("=")
        if name in ("--model-path", "--model"):
            if has_equals:
                return value
            return argv[position + 1] if position + 1 < len(argv) else None
    return None


def default_pool_tokens(model_path: str | None) -> int:
    """KV pool size in tokens: a quarter of the free memory, at most 65,536 tokens.

    A model without a readable local `config.json` gets a fixed pool.
    """
    per_token = kv_bytes_per_token(model_path)
    if per_token is None:
        return FALLBACK_POOL_TOKENS
    affordable = int(available_memory_bytes() * POOL_SHARE_OF_MEMORY) // per_token
    return min(MAX_DEFAULT_POOL_TOKENS, max(1024, affordable))


def kv_bytes_per_token(model_path: str | None) -> int | None:
    """Bytes of K and V of one token over all layers, from the model's `config.json`."""
    config_path = Path(model_path or "") / "config.json"
    if model_path is None or not config_path.is_file():
        return None
    config = json.loads(config_path.read_text())
    if "num_hidden_layers" not in config or "num_attention_heads" not in config:
        return None
    num_heads = config["num_attention_heads"]
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    return int(2 * config["num_hidden_layers"] * num_kv_heads * head_dim * KV_DTYPE_BYTES)


def available_memory_bytes() -> int:
    """Memory that can be used without swapping, from /proc/meminfo."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("kvedit: /proc/meminfo: expected MemAvailable, got none")
