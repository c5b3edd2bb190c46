"""Which rotation moves a cached key: rope specifications read from a model's config.

Called by: `sglang_patches.pools`, which compares them with what the host rotates by.
May touch: configs and numbers; no tensor.
"""

from kvedit.errors import UnsupportedRope
from kvedit.rope.families import keeps_idle_rotary
from kvedit.rope.model import rope_specs
from kvedit.rope.spec import RopeSpec

__all__ = ["RopeSpec", "UnsupportedRope", "keeps_idle_rotary", "rope_specs"]
