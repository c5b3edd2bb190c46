"""What a change of a field may be served by; asked for by a declaration or by a request."""

from __future__ import annotations

from typing import Literal

Strategy = Literal["recompute", "erratum", "edit", "edit+erratum", "auto"]
STRATEGIES: tuple[Strategy, ...] = ("recompute", "erratum", "edit", "edit+erratum", "auto")
