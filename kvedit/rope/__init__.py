"""Which rotation moves a cached key: rope specifications read from a model's config."""

from kvedit.errors import UnsupportedRope
from kvedit.rope.model import rope_specs
from kvedit.rope.spec import RopeSpec

__all__ = ["RopeSpec", "UnsupportedRope", "rope_specs"]
