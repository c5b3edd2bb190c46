"""What requests were served with, kept on a server that was started for testing."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass

from kvedit.splice.spans import Pieces
from sglang_patches.host.protocols import Request
from sglang_patches.scheduler.request_state import RequestState

MAX_SERVED = 256


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """A finished request: its prompt as served, and its path as far as the tree holds it."""

    num_prompt_tokens: int
    ids: array[int]
    pieces: Pieces
    extra_key: str | None
    cache_salt: str | None


class ServedLog:
    """By request id, the newest ``MAX_SERVED``."""

    def __init__(self) -> None:
        self._served: OrderedDict[str, ServedRequest] = OrderedDict()

    def note(self, req: Request, state: RequestState, up_to: int) -> None:
        """The request has ended; ``up_to`` tokens of its path are in the tree."""
        ids = (req.origin_input_ids + array("q", req.output_ids))[:up_to]
        self._served[req.rid] = ServedRequest(
            len(req.origin_input_ids), ids, state.pieces, req.extra_key, req.cache_salt
        )
        while len(self._served) > MAX_SERVED:
            self._served.popitem(last=False)

    def of(self, rid: str) -> ServedRequest:
        return self._served[rid]
