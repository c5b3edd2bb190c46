"""What is said when a skill is registered, once its text is token ids."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

# msgspec reads these annotations at run time, when array takes no [int].
if TYPE_CHECKING:
    TokenIds: TypeAlias = array[int]
else:
    TokenIds = array


@dataclass(frozen=True, slots=True, kw_only=True)
class SkillDeclaration:
    """
    token_ids       int64, at least one
    compile_prefix  int64, prefilled in front of token_ids and dropped
    seam            tokens recomputed at the front of a splice; None: the server's default
    pin             the cache shall keep it, within the pin budget
    replace         another content under the name is retired instead of refused
    memory          its text may hold declared fields
    """

    name: str
    namespace: str  # a namespace tag, or SHARED
    token_ids: TokenIds
    compile_prefix: TokenIds
    seam: int | None = None
    pin: bool = False
    replace: bool = False
    memory: bool = False

    @property
    def key(self) -> tuple[str, str]:
        """(namespace, name): what one current skill at a time may have."""
        return self.namespace, self.name
