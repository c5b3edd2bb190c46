"""The last answers of the scheduler, for reads that come while it is deep in a forward pass."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, TypeVar

import msgspec

from kvedit.errors import KvEditError, Unavailable
from kvedit.wire.commands import Command
from kvedit.wire.views import View
from sglang_patches.host.protocols import TokenizerManager
from sglang_patches.http.services import rpc

FRESH_WITHIN_S = 1.0
FIRST_WITHIN_S = 15.0  # with nothing to show instead, a forward of a slow host is waited for
_MAX_ANSWERS = 1024
V = TypeVar("V", bound=View)


class Mirror:
    """Asks the scheduler; answers with what it last said, marked stale, when that takes long."""

    def __init__(
        self, manager: TokenizerManager, *, fresh_within_s: float = FRESH_WITHIN_S
    ) -> None:
        self._manager = manager
        self._fresh_within_s = fresh_within_s
        self._answers: OrderedDict[Command[Any], Any] = OrderedDict()  # equal commands hash alike

    async def read(self, command: Command[V]) -> V:
        """The answer to a command that changes nothing; ``stale`` when it is an old one.

        Raises the KvEditError the scheduler answered, and Unavailable when there is no old answer.
        """
        timeout_s = self._fresh_within_s if command in self._answers else FIRST_WITHIN_S
        try:
            answer = await rpc.call(self._manager, command, timeout_s=timeout_s)
        except Unavailable:
            if command not in self._answers:
                raise
            old: V = self._answers[command]
            return msgspec.structs.replace(old, stale=True)
        except KvEditError:
            self._answers.pop(command, None)
            raise
        self._answers[command] = answer
        self._answers.move_to_end(command)
        while len(self._answers) > _MAX_ANSWERS:
            self._answers.popitem(last=False)
        return answer

    def forget(self) -> None:
        """After a change: an old answer would deny what the caller has just done."""
        self._answers.clear()
