"""The last answers of the scheduler, for reads that come while it is deep in a forward pass."""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any

from kvedit.errors import KvEditError, Unavailable
from sglang_patches.http.admin import rpc

FRESH_WITHIN_S = 1.0
FIRST_WITHIN_S = 15.0  # with nothing to show instead, a forward of a slow host is waited for
_MAX_ANSWERS = 1024


class Mirror:
    """Asks the scheduler; answers with what it last said, marked stale, when that takes long."""

    def __init__(self, manager: Any, *, fresh_within_s: float = FRESH_WITHIN_S) -> None:
        self._manager = manager
        self._fresh_within_s = fresh_within_s
        self._answers: OrderedDict[str, dict[str, Any]] = OrderedDict()

    async def read(self, command: dict[str, Any]) -> dict[str, Any]:
        """The answer to a command that changes nothing; ``"stale": True`` when it is an old one.

        Raises the KvEditError the scheduler answered, and Unavailable when there is no old answer.
        """
        key = json.dumps(command, sort_keys=True)
        timeout_s = self._fresh_within_s if key in self._answers else FIRST_WITHIN_S
        try:
            answer = await rpc.call(self._manager, command, timeout_s=timeout_s)
        except Unavailable:
            if key not in self._answers:
                raise
            return {**self._answers[key], "stale": True}
        except KvEditError:
            self._answers.pop(key, None)
            raise
        self._answers[key] = answer
        self._answers.move_to_end(key)
        while len(self._answers) > _MAX_ANSWERS:
            self._answers.popitem(last=False)
        return answer

    def forget(self) -> None:
        """After a change: an old answer would deny what the caller has just done."""
        self._answers.clear()
