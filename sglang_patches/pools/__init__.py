"""The host's KV pool as groups of layers that one relocation launch serves.

Called by: the scheduler, at start-up, and its copies.
May touch: the pool's tensors and the model's rotary layers, to read them.
"""

from sglang_patches.pools.describe import GroupWithRope, describe_pool
from sglang_patches.pools.slots import LostWindowSlots, translate

__all__ = ["GroupWithRope", "LostWindowSlots", "describe_pool", "translate"]
