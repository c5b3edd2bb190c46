"""The rotation of one layer, free of any framework."""

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class RopeSpec:
    """How one layer rotates its keys.

    head_dim    width of a cached key head (for MLA: of the rope part of the latent row)
    rotary_dim  the first `rotary_dim` of `head_dim` are rotated, the others pass through
    is_neox     pairs are (i, i + rotary_dim/2) when true, (2i, 2i + 1) when false
    inv_freq    radians per position of each pair, fp64, scaling applied; [rotary_dim / 2]
    kind        name of the scaling, for people and for the identity
    """

    head_dim: int
    rotary_dim: int
    is_neox: bool
    inv_freq: tuple[float, ...]
    kind: str

    def angles(self, delta_pos: int) -> npt.NDArray[np.float64]:
        """Radians that move a key by `delta_pos` positions (may be negative); [rotary_dim/2]."""
        return float(delta_pos) * np.asarray(self.inv_freq, dtype=np.float64)

    def signature(self) -> str:
        """Stable text: equal for two layers exactly when one rotation serves both."""
        # Twelve digits: far below any angle that a 16-bit or fp32 key can show, far above
        # the last-bit differences between numpy builds.
        digits = ",".join(f"{f:.12e}" for f in self.inv_freq)
        digest = hashlib.sha256(digits.encode()).hexdigest()[:16]
        style = "neox" if self.is_neox else "gptj"
        return f"{self.kind}:{style}:{self.rotary_dim}/{self.head_dim}:{digest}"
