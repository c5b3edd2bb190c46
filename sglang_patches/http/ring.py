"""The newest request reports of one HTTP process, by request id."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from kvedit.errors import NotFound


class ReportRing:
    """Keeps ``size`` reports. A report is shown to the namespace whose request made it."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._reports: OrderedDict[str, tuple[str, dict[str, Any]]] = OrderedDict()

    def put(self, request_id: str, namespace: str, report: dict[str, Any]) -> None:
        """Keep ``report``; a client may use its request id again, the last request counts."""
        self._reports[request_id] = (namespace, report)
        self._reports.move_to_end(request_id)
        while len(self._reports) > self._size:
            self._reports.popitem(last=False)

    def get(self, request_id: str, namespace: str) -> dict[str, Any]:
        """Raises NotFound, in the same words for an id of another namespace."""
        owner, report = self._reports.get(request_id, ("", {}))
        if owner != namespace:
            raise NotFound(
                f"kvedit: request {request_id[:200]!r}: expected the id of a recent request of "
                "this namespace, got an unknown one"
            )
        return report

    def find(self, request_id: str) -> dict[str, Any] | None:
        """For answers on their way to the client that sent the request."""
        entry = self._reports.get(request_id)
        return None if entry is None else entry[1]
