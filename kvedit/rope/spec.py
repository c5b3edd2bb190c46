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

    def rotate(
        self, keys: npt.NDArray[np.float64], delta_pos: npt.ArrayLike
    ) -> npt.NDArray[np.float64]:
        """Keys moved by `delta_pos` positions: the definition that every kernel is held to.

        keys       fp64 [num_tokens, head_dim]
        delta_pos  int, or int [num_tokens]; may be negative
        """
        angles = np.multiply.outer(np.asarray(delta_pos, dtype=np.float64), self.inv_freq)
        cos, sin = np.cos(angles), np.sin(angles)
        first, second = self._pairs()
        rotated = keys.copy()
        rotated[..., first] = keys[..., first] * cos - keys[..., second] * sin
        rotated[..., second] = keys[..., second] * cos + keys[..., first] * sin
        return rotated

    def _pairs(self) -> tuple[slice, slice]:
        half = self.rotary_dim // 2
        if self.is_neox:
            return slice(0, half), slice(half, self.rotary_dim)
        return slice(0, self.rotary_dim, 2), slice(1, self.rotary_dim, 2)

    def signature(self) -> str:
        """Stable text: two layers of one signature are moved by one rotation. Not the other way
        round: the kind and the head's width are in it too."""
        # Twelve digits: far below any angle that a 16-bit or fp32 key can show, far above
        # the last-bit differences between numpy builds.
        digits = ",".join(f"{f:.12e}" for f in self.inv_freq)
        digest = hashlib.sha256(digits.encode()).hexdigest()[:16]
        style = "neox" if self.is_neox else "gptj"
        return f"{self.kind}:{style}:{self.rotary_dim}/{self.head_dim}:{digest}"
