"""Faults on purpose, of a server that was started for testing (KVEDIT_TESTING=1).

A hook that is armed fails as often as it was told to. The first fault that is armed puts this
module into ``guard.fail_point``; until then the product asks nobody. So a hook fails where it
has its name in the product: a boundary and what is contained at the end of the body, an
agreement in front of its vote. The copies' launches fail before they write anything
(``scheduler.testing.faulty_queue``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from kvedit.errors import BadRequest
from sglang_patches import guard

HTTP_HOOKS = ("answer", "message_report", "openai_report", "report")
# A splice that is in the tree is handed to its request at the end of either of its entries.
_POINTS_OF = {"hand_over": ("checkpoint", "init_load_back")}
SCHEDULER_HOOKS = (
    *("intake", "choose_prompt", "match_prefix", "cover"),
    *("init_load_back", "checkpoint", "donors", "realise", *_POINTS_OF),
    *("forward", "relocate", "relocate_ref", "release_done", "end_holders"),
    *("finish_compile", "compiled", "record_turn", "streamer"),
    *("epoch", "new_epoch", "rpc", "command"),
    *("events", "prune_events", "metrics", "sort_free_slots"),
)


class InjectedFault(RuntimeError):
    """Raised on purpose (see ``arm``)."""


@dataclass(slots=True)
class _Fault:
    """passes: entries that are let through first; times: those that fail then."""

    passes: int
    times: int


_armed: dict[str, _Fault] = {}  # by point


def arm(hook: str, times: int = 1, *, passes: int = 0) -> None:
    """Let the next ``times`` entries of ``hook`` fail, behind the next ``passes``."""
    fault = _Fault(passes, times)
    for point in _POINTS_OF.get(hook, (hook,)):
        _armed[point] = fault
    guard.fail_point = _fail


def disarm() -> None:
    """Nothing fails on purpose any more."""
    _armed.clear()
    guard.fail_point = guard.no_fault


def wanted(command: Mapping[str, object]) -> tuple[str, int]:
    """(hook, times) of a command {"hook", "times"}. Raises BadRequest: a test whose fault never
    strikes would pass."""
    hook, times = command.get("hook"), command.get("times", 1)
    known = (*HTTP_HOOKS, *SCHEDULER_HOOKS)
    if not isinstance(hook, str) or hook not in known:
        names = ", ".join(sorted(known))
        raise BadRequest(f"kvedit: fault: hook: expected one of {names}, got {hook!r}")
    if not isinstance(times, int):
        raise BadRequest(f"kvedit: fault: times: expected an integer, got {times!r}")
    return hook, times


def is_taken(command: Mapping[str, object], hooks: Collection[str]) -> bool:
    """Arm what ``command`` names if it is one of ``hooks``; whether it was."""
    if command.get("hook") not in hooks:
        return False
    arm(*wanted(command))
    return True


def _fail(point: str) -> None:
    fault = _armed.get(point)
    if fault is None:
        return
    if fault.passes > 0:
        fault.passes -= 1
    elif fault.times > 0:
        fault.times -= 1
        raise InjectedFault(f"kvedit: injected fault in {point}")
