"""The boundary of a host hook: the one place that catches everything.

An unexpected error of ours costs the request at hand its plan. It is logged with its traceback
and counted, and never reaches the scheduler, which would stop the server.
"""

from __future__ import annotations

import logging
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger("kvedit")

errors: Counter[str] = Counter()  # by hook name; shown by GET /kvedit/status
_faults: dict[str, int] = {}  # armed by tests: hook name -> failures left


class InjectedFault(RuntimeError):
    """Raised on purpose by a test (see ``arm``)."""


def arm(hook: str, times: int = 1) -> None:
    """Let the next ``times`` entries of ``hook`` fail. For tests: reached through the admin RPC
    of a server that was started with KVEDIT_TESTING=1."""
    _faults[hook] = times


def trip(hook: str) -> None:
    """Fail here if a test armed this hook."""
    if _faults and _faults.get(hook, 0) > 0:
        _faults[hook] -= 1
        raise InjectedFault(f"kvedit: injected fault in {hook}")


@contextmanager
def boundary(hook: str, on_error: Callable[[], None]) -> Iterator[None]:
    """Run a hook body; after an unexpected error run ``on_error`` instead of the rest of it."""
    try:
        yield
    except Exception:
        errors[hook] += 1
        logger.error("kvedit: hook %s failed:\n%s", hook, traceback.format_exc())
        on_error()
