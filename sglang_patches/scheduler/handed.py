"""A choice on its way from the one who made it to the match that follows."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.mem_cache.radix_cache import RadixKey

from kvedit.splice.spans import Plan
from kvedit.splice.spelling import Choice


@dataclass(frozen=True, slots=True)
class Handed:
    """What was chosen for ``key`` and ``plan``. It holds as long as the tree does not change."""

    key: RadixKey
    plan: Plan
    choice: Choice

    def is_for(self, key: RadixKey, plan: Plan) -> bool:
        """Whether ``key`` and ``plan`` would be given the same choice by the same tree. The host
        matches with a limit, the prompt's last token at least is left to be computed: that
        decides nothing where no look into the tree found more than the limit."""
        mine, num_tokens = self.key, len(key.token_ids)
        limit = num_tokens if key.limit is None else key.limit
        return (
            plan is self.plan
            and self.choice.deepest <= limit
            and (mine.extra_key, mine.cache_salt) == (key.extra_key, key.cache_salt)
            and mine.token_ids == key.token_ids
        )
