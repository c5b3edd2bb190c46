"""The boundary of a host hook: the one place that catches everything.

An unexpected error of ours costs the request at hand its plan. It is logged with its traceback
and counted, and never reaches the scheduler, which would stop the server.

Tensor-parallel ranks take the same decisions, so an error on one of them has to end the hook on
all. With several ranks a boundary ends with a vote, and only a hook that every rank was well in
counts as done:

    a rank that fails           votes "failed", once, where the boundary ends
    a body before it changes    ``agree()``: a vote of its own. What may fail on one rank alone
    what ranks share            (device work) stands in front of it, bookkeeping behind it
    a lost vote                 ends the body on every rank; nobody votes in that hook again

So a rank that has failed always meets the vote that the others are at, whichever it is. This
holds for hooks that every rank enters in the same order, and boundaries do not nest, but for the
launch of copies, which all ranks enter in step (behind an ``agree()``, or outside of any hook).

Each of these has a name, by which a test can let it fail (``fail_point``): a boundary at the end of
the body, which has done everything by then and has the most to undo; an ``agree()`` in front of
its vote.

Cost with several ranks, one all_reduce of one integer over the host's CPU group each (on one
host about 0.1 ms). None while nothing is registered; then for each request
    1 at intake, 1 per chunk, 1 at the end; where something could be composed or edited, per try
    of admission 1 for the match (1 more where fields are declared, and 1 where the queue is
    ordered by match), per composed run 3, per launch of copies 1. A compile: 4. A command: 2.
"""

from __future__ import annotations

import logging
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

logger = logging.getLogger("kvedit")

errors: Counter[str] = Counter()  # by hook name; shown by GET /kvedit/status


class LostVote(Exception):
    """Another rank failed in this hook."""


@dataclass(slots=True)
class Outcome:
    """is_well: the body ended, a boundary's on every rank. error: what a boundary's body raised on
    this one."""

    is_well: bool = False
    error: Exception | None = None


@dataclass(slots=True)
class _Ranks:
    """group: process group of the ranks, None if there is one; level: see ``join``."""

    group: Any = None
    level: Callable[[], None] = lambda: None


_ranks = _Ranks()


def join(group: Any, level: Callable[[], None]) -> None:
    """Vote among the ranks of ``group`` (None: there is no other) from now on.

    level: makes equal, after a lost vote, what a body may have changed on some ranks only. It
    runs behind the hook's ``on_error``; only around a launch of copies inside a splice do all
    ranks still hold the splice's locks.
    """
    _ranks.group, _ranks.level = group, level


def no_fault(point: str) -> None:
    """Nothing fails on purpose."""


# Raises where a test wants the point of that name to fail. Only ``faults`` puts another one here.
fail_point: Callable[[str], None] = no_fault


@contextmanager
def boundary(hook: str, on_error: Callable[[], None]) -> Iterator[Outcome]:
    """Run a hook body; after an unexpected error, on any rank, run ``on_error`` on all.

    What the body found out may be used only where the outcome is well. An ``on_error`` undoes
    what the body may have done, wherever it stopped, and must not fail.
    """
    outcome = Outcome()
    try:
        yield outcome
        fail_point(hook)
    except LostVote:
        pass
    except Exception as error:
        outcome.error = error
        logger.error("kvedit: hook %s failed:\n%s", hook, traceback.format_exc())
        _all_well(False)
    else:
        outcome.is_well = _all_well(True)
    if outcome.is_well:
        return
    errors[hook] += 1
    if outcome.error is None:
        logger.error("kvedit: hook %s failed on another rank", hook)
    on_error()
    if _ranks.group is not None:
        _ranks.level()


def agree(point: str) -> None:
    """Inside a boundary: go on only if every rank came this far. Raises LostVote."""
    fail_point(point)
    if not _all_well(True):
        raise LostVote


def highest(number: int) -> int:
    """The highest number of any rank. Where all ranks are in step."""
    return _reduced(number, torch.distributed.ReduceOp.MAX)


def _all_well(is_well: bool) -> bool:
    return bool(_reduced(int(is_well), torch.distributed.ReduceOp.MIN))


def _reduced(number: int, operation: Any) -> int:
    if _ranks.group is None:
        return number
    votes = torch.tensor([number], dtype=torch.int64)
    torch.distributed.all_reduce(votes, operation, group=_ranks.group)
    return int(votes)


@contextmanager
def contained(what: str) -> Iterator[Outcome]:
    """Run what decides nothing, and what only one rank may have: events, metrics, logs, a kernel
    that another one can stand in for. An error in it is counted, and told at its 1st, 2nd, 4th,
    8th, ... time. Nobody votes: the outcome is that of this rank."""
    outcome = Outcome()
    try:
        yield outcome
        fail_point(what)
    except Exception:
        errors[what] += 1
        if errors[what].bit_count() == 1:
            logger.error("kvedit: %s failed:\n%s", what, traceback.format_exc())
    else:
        outcome.is_well = True
