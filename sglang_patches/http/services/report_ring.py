"""The newest request reports of one HTTP process, by request id."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, cast

import orjson

from kvedit.errors import NotFound
from kvedit.splice.token_classes import without_values

MAX_BYTES = 64 * 1024 * 1024  # of reports as JSON, with their ids


class ReportRing:
    """Keeps ``size`` reports, and less where they are long.

    A report is shown to whoever names its request from inside its namespace, and clients choose
    ids that others may guess: it holds no value of a prompt and nothing that proves anything.
    """

    def __init__(self, size: int, max_bytes: int = MAX_BYTES) -> None:
        self._size = size
        self._max_bytes = max_bytes
        self._num_bytes = 0
        # An id means something only inside its namespace.
        self._reports: OrderedDict[tuple[str, str], bytes] = OrderedDict()

    def put(self, request_id: str, namespace: str, report: dict[str, Any]) -> None:
        """Keep ``report``; a client may use its request id again, the last request counts."""
        key = namespace, request_id
        self._drop(key)
        self._reports[key] = orjson.dumps(without_values(report))
        self._num_bytes += _num_bytes(key, self._reports[key])
        while len(self._reports) > self._size or self._num_bytes > self._max_bytes:
            self._drop(next(iter(self._reports)))

    def get(self, request_id: str, namespace: str) -> dict[str, Any]:
        """Raises NotFound, in the same words for an id of another namespace."""
        report = self._reports.get((namespace, request_id))
        if report is None:
            raise NotFound(
                f"kvedit: request {request_id[:200]!r}: expected the id of a recent request of "
                "this namespace, got an unknown one"
            )
        return cast(dict[str, Any], orjson.loads(report))

    def _drop(self, key: tuple[str, str]) -> None:
        report = self._reports.pop(key, None)
        if report is not None:
            self._num_bytes -= _num_bytes(key, report)


def _num_bytes(key: tuple[str, str], report: bytes) -> int:
    return sum(map(len, key)) + len(report)
