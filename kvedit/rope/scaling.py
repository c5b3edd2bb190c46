"""From one layer's rope parameters to its frequencies, or to the reasons against it."""

from collections.abc import Mapping
from typing import Any

from kvedit.rope import frequencies

REFUSED_TYPES = {
    "dynamic": "its base grows with the request's length, so a cached key has no one rotation",
    "proportional": "it rotates two separate parts of the head, which no kernel here does",
    "su": "this is an old name of longrope that the host does not serve",
}
REQUIRED_PARAMS = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
}
ALIASES = {"mrope": "default", "deepseek_yarn": "yarn"}


def scaling_type(params: Mapping[str, Any]) -> str:
    """The scaling's name; configs of both transformers generations are read."""
    name = params.get("rope_type") or params.get("type") or "default"
    return ALIASES.get(str(name), str(name))


def kind_of(params: Mapping[str, Any]) -> str:
    """The scaling's name with the multimodal axis layout, as in `yarn+mrope_interleaved`."""
    name = scaling_type(params)
    if "mrope_section" not in params:
        return name
    # All three axes advance by one per text token and move together with a splice, so the
    # layout never changes the rotation; it is part of the identity all the same.
    if params.get("mrope_interleaved_glm"):
        return f"{name}+mrope_interleaved_glm"
    return f"{name}+mrope_interleaved" if params.get("mrope_interleaved") else f"{name}+mrope"


def refusals(params: Mapping[str, Any], rotary_dim: int, context_len: int | None) -> list[str]:
    """Why keys under `params` cannot be relocated; empty if they can. Of a type that is not served
    the type is the one reason."""
    name = scaling_type(params)
    if name in REFUSED_TYPES:
        return [_type_refusal(name, REFUSED_TYPES[name])]
    if name not in REQUIRED_PARAMS:
        return [_type_refusal(name, "unknown to kvedit")]
    missing = [key for key in REQUIRED_PARAMS[name] if params.get(key) is None]
    reasons = [f"kvedit: rope {name}: expected {key}, got none" for key in missing]
    for flag in ("use_fope", "video_rope"):
        if params.get(flag):
            reasons.append(_type_refusal(flag, "its angles are not linear in the position"))
    if name == "longrope" and not missing:
        reasons += _longrope_refusals(params, rotary_dim, context_len)
    return reasons


def inv_freq(params: Mapping[str, Any], base: float, rotary_dim: int) -> frequencies.Frequencies:
    """fp64 [rotary_dim / 2] for parameters that `refusals` let pass."""
    name = scaling_type(params)
    if name == "linear":
        return frequencies.linear(base, rotary_dim, params)
    if name == "llama3":
        return frequencies.llama3(base, rotary_dim, params)
    if name == "yarn":
        return frequencies.yarn(base, rotary_dim, params)
    if name == "longrope":
        return frequencies.longrope(base, rotary_dim, params["short_factor"])
    return frequencies.default(base, rotary_dim)


def _type_refusal(name: str, why: str) -> str:
    served = ", ".join(sorted(REQUIRED_PARAMS))
    return f"kvedit: rope type: expected one of {served}, got {name} ({why})"


def _longrope_refusals(
    params: Mapping[str, Any], rotary_dim: int, context_len: int | None
) -> list[str]:
    reasons = [
        f"kvedit: longrope {key}: expected {rotary_dim // 2} factors, got {len(params[key])}"
        for key in ("short_factor", "long_factor")
        if len(params[key]) != rotary_dim // 2
    ]
    one_set = list(params["short_factor"]) == list(params["long_factor"])
    original_len = int(params["original_max_position_embeddings"])
    # The host rotates a whole batch with the long factors as soon as one position passes the
    # original length: only a server that can never get there has one rotation per key.
    if not one_set and (context_len is None or context_len > original_len):
        reasons.append(
            f"kvedit: longrope context length: expected at most {original_len} (beyond it the "
            f"factor set depends on the request's length), got {context_len or 'no limit'}"
        )
    return reasons
