"""A server's settings, read from kvedit's environment variables.

Elsewhere: a client's URL and keys (``kvedit.cli.connect``), $KVEDIT_HOME for the model folders
(``kvedit.workbench.model_store``).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvedit.errors import BadRequest

Trust = Literal["tokens", "replies", "names"]  # what they mean: kvedit.edit.proofs
TRUSTS: tuple[Trust, ...] = ("tokens", "replies", "names")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Settings of one server, fixed at start-up. Token counts are in tokens, waits in seconds."""

    pin_fraction: float = 0.5  # share of the KV pool that pinned skills may hold
    compile_wait_s: float = 10.0  # how long `require` waits for a recompile
    open: bool = False  # admin routes from any address although no key is set
    client_skills: bool = False  # ordinary clients may register skills of their own namespace
    trust: Trust = "tokens"  # what proves that an earlier turn is the caller's
    allow: frozenset[str] = frozenset()  # untested server arguments the operator takes on
    seam: int = 16  # skill tokens recomputed behind the real prefix, until a gate measures it
    min_span_tokens: int = 16  # a shorter span costs more in bookkeeping than it saves
    boundary_tokens: int = 64  # price of a forced chunk boundary; bench/bench_boundary.py
    retired_max: int = 64  # retired segments kept for running conversations
    client_max_skills: int = 32  # per namespace
    client_max_tokens: int = 65_536  # per namespace, all skills together
    client_rate_per_minute: int = 60  # registrations per namespace
    ring_size: int = 10_000  # request reports kept for GET /kvedit/requests/{id}
    exact: bool = False  # every request gets exact KV of the prompt as sent
    reports: bool = True  # whether answers carry reports; the ring keeps them anyway
    testing: bool = False  # started for tests: faults can be injected, cached KV dumped
    home: Path = Path("~/.cache/kvedit").expanduser()

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Config:
        """Read ``KVEDIT_*``. Raises BadRequest that names the variable, expected and got."""
        default = cls()  # a slotted class keeps no defaults of its own
        return cls(
            pin_fraction=_number(
                env, "KVEDIT_PIN_FRACTION", default.pin_fraction, low=0.0, high=1.0
            ),
            compile_wait_s=_number(env, "KVEDIT_COMPILE_WAIT", default.compile_wait_s, low=0.0),
            open=_flag(env, "KVEDIT_OPEN"),
            client_skills=_flag(env, "KVEDIT_CLIENT_SKILLS"),
            trust=_trust(env),
            allow=frozenset(
                filter(None, (s.strip() for s in env.get("KVEDIT_ALLOW", "").split(",")))
            ),
            seam=int(_number(env, "KVEDIT_SEAM", default.seam, low=0)),
            min_span_tokens=int(_number(env, "KVEDIT_MIN_SPAN", default.min_span_tokens, low=1)),
            boundary_tokens=int(
                _number(env, "KVEDIT_BOUNDARY_TOKENS", default.boundary_tokens, low=0)
            ),
            retired_max=int(_number(env, "KVEDIT_RETIRED_MAX", default.retired_max, low=0)),
            client_max_skills=int(
                _number(env, "KVEDIT_CLIENT_MAX_SKILLS", default.client_max_skills, low=0)
            ),
            client_max_tokens=int(
                _number(env, "KVEDIT_CLIENT_MAX_TOKENS", default.client_max_tokens, low=0)
            ),
            client_rate_per_minute=int(
                _number(env, "KVEDIT_CLIENT_RATE", default.client_rate_per_minute, low=0)
            ),
            ring_size=int(_number(env, "KVEDIT_RING_SIZE", default.ring_size, low=1)),
            exact=_flag(env, "KVEDIT_EXACT"),
            reports=_switch(env, "KVEDIT_REPORT"),
            testing=_flag(env, "KVEDIT_TESTING"),
            home=Path(env.get("KVEDIT_HOME", "~/.cache/kvedit")).expanduser(),
        )


def _flag(env: Mapping[str, str], name: str) -> bool:
    text = env.get(name, "0")
    if text not in ("0", "1", ""):
        raise BadRequest(f"kvedit: {name}: expected 0 or 1, got {text!r}")
    return text == "1"


def _switch(env: Mapping[str, str], name: str) -> bool:
    text = env.get(name) or "on"
    if text not in ("on", "off"):
        raise BadRequest(f"kvedit: {name}: expected on or off, got {text!r}")
    return text == "on"


def _trust(env: Mapping[str, str]) -> Trust:
    text = env.get("KVEDIT_TRUST") or Config().trust
    for trust in TRUSTS:
        if text == trust:
            return trust
    raise BadRequest(f"kvedit: KVEDIT_TRUST: expected one of {', '.join(TRUSTS)}, got {text!r}")


def _number(
    env: Mapping[str, str],
    name: str,
    default: float,
    *,
    low: float,
    high: float = float("inf"),
) -> float:
    text = env.get(name)
    if text is None or text == "":
        return default
    try:
        value = float(text)
    except ValueError:
        raise BadRequest(f"kvedit: {name}: expected a number, got {text!r}") from None
    if not low <= value <= high:
        raise BadRequest(f"kvedit: {name}: expected a number in [{low}, {high}], got {text!r}")
    return value
