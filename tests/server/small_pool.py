"""The server with room for 3,000 tokens: pins, eviction and storms happen on it."""

from __future__ import annotations

import dataclasses

from tests.server.harness import SMALL_POOL as PLAIN_SMALL_POOL

POOL = 3_000
BUDGET = 1_500  # KVEDIT_PIN_FRACTION is one half
# Prompts that are too long are cut by the host, which must not confuse a plan.
SMALL_POOL = dataclasses.replace(PLAIN_SMALL_POOL, flags=("--allow-auto-truncate",))
