"""Start-up refusals: what this server may not be combined with, all reasons at once."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import msgspec

from kvedit.config import Config
from kvedit.errors import BadRequest, Unsupported
from sglang_patches.host.server_args import CHECK_RESOLVED, REFUSED, TESTED, UNTESTED

HOST_VERSION = "0.5.23"
BACKEND = "kvedit"
RESOLVE_TARGET = "sglang.srt.server_args.ServerArgs.resolve_once"
ENVIRONMENT = {
    "SGLANG_RUST_SERVER": (False, "kvedit's routes and reports live in the Python HTTP server"),
    "SGLANG_RADIX_FORCE_MISS": (False, "a skill is found by matching the prefix tree"),
    "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": ("rust", "only the Rust tree core is tested"),
}
"""SGLang's environment switches: (accepted value, why)."""


def check_server_args(
    server_args: Any, model_config: Any = None, allow: frozenset[str] | None = None
) -> None:
    """Refuse a server that kvedit cannot serve correctly.

    Args:
        server_args: a resolved `sglang.srt.server_args.ServerArgs`.
        model_config: SGLang's `ModelConfig` where the caller has it; its kind is then checked too.
        allow: names of untested arguments the operator takes on (default: `KVEDIT_ALLOW`).

    Raises:
        Unsupported: with every reason.
    """
    reasons = refusals(server_args, model_config, allow)
    if reasons:
        raise Unsupported(reasons)


def resolved_hook(result: None, server_args: Any) -> None:
    """AFTER hook of `ServerArgs.resolve_once`: refuse before the first process is spawned.

    A server with another cache backend is not ours and passes.
    """
    if server_args.radix_cache_backend == BACKEND:
        check_server_args(server_args)


def refusals(
    server_args: Any, model_config: Any = None, allow: frozenset[str] | None = None
) -> list[str]:
    """All reasons to refuse, in a stable order; empty when the server may start."""
    problems: list[str] = []
    allowed = allow or frozenset()
    try:
        allowed = Config.from_env().allow if allow is None else allow
    except BadRequest as error:  # a variable of ours
        problems.append(str(error).removeprefix("kvedit: "))
    return [
        *problems,
        *_version_refusals(version("sglang")),
        *_environment_refusals(),
        *_refused_arguments(server_args),
        *_untested_arguments(server_args, allowed),
        *(_model_refusals(model_config) if model_config is not None else []),
    ]


def _version_refusals(installed: str) -> list[str]:
    if installed == HOST_VERSION:
        return []
    return [f"sglang: expected version {HOST_VERSION}, got {installed}"]


def _environment_refusals() -> list[str]:
    from sglang.srt.environ import envs

    found = {name: getattr(envs, name).get() for name in ENVIRONMENT}
    return [
        f"{name}: expected {accepted}, got {found[name]} ({why})"
        for name, (accepted, why) in ENVIRONMENT.items()
        if found[name] != accepted
    ]


def _refused_arguments(server_args: Any) -> list[str]:
    from sglang.srt.arg_groups.overrides import resolution_result

    reasons = []
    for name, rule in REFUSED.items():
        value = resolution_result(server_args, name)
        if not rule.accepts(value):
            reasons.append(f"{_flag(name)}: expected {rule.expected}, got {value!r} ({rule.why})")
    return reasons


def _untested_arguments(server_args: Any, allowed: frozenset[str]) -> list[str]:
    """Arguments outside the tested values. The record keeps the operator's input as it came."""
    from sglang.srt.arg_groups.overrides import resolution_result

    defaults = default_values(type(server_args))
    reasons = []
    for name in sorted(UNTESTED | TESTED.keys()):
        given = getattr(server_args, name)
        value = resolution_result(server_args, name) if name in CHECK_RESOLVED else given
        tested = TESTED.get(name, frozenset())
        if name in allowed or given == value == defaults[name] or tested is None:
            continue
        if all(value != accepted for accepted in tested):
            reasons.append(
                f"{_flag(name)}: expected {_words(tested, defaults[name])}, got {value!r} "
                f"(not tested; KVEDIT_ALLOW={name} takes it on)"
            )
    return reasons


def _model_refusals(model_config: Any) -> list[str]:
    kinds = (
        ("multimodal", model_config.is_multimodal),
        ("an encoder-decoder", model_config.is_encoder_decoder),
        ("an embedding or reward model", not model_config.is_generation),
    )
    return [
        f"model: expected a text-only causal language model, got {kind}"
        for kind, present in kinds
        if present
    ]


def default_values(record: type) -> dict[str, Any]:
    """Default of every field of SGLang's argument record; the required one maps to NODEFAULT."""
    return {
        field.name: field.default
        if field.default_factory is msgspec.NODEFAULT
        else field.default_factory()
        for field in msgspec.structs.fields(record)
    }


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _words(tested: frozenset[Any], default: Any) -> str:
    values = sorted(str(value) for value in tested if value is not None)
    return " or ".join(values) if values else f"the default {default!r}"
