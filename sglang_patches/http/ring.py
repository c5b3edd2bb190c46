"""The newest request reports of one HTTP process, by request id."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from kvedit.errors import NotFound


class ReportRing:
    """Keeps ``size`` reports. A report is shown to the namespace whose request made it."""

    def __init__(self, size: int) -> None:
        self._size = size
        # Clients choose request ids, so an id means something only inside its namespace.
        self._reports: OrderedDict[tuple[str, str], dict[str, Any]] = OrderedDict()

    def put(self, request_id: str, namespace: str, report: dict[str, Any]) -> None:
        """Keep ``report``; a client may use its request id again, the last request counts."""
        self._reports[namespace, request_id] = report
        self._reports.move_to_end((namespace, request_id))
        while len(self._reports) > self._size:
            self._reports.popitem(last=False)

    def get(self, request_id: str, namespace: str) -> dict[str, Any]:
        """Raises NotFound, in the same words for an id of another namespace."""
        report = self.find(request_id, namespace)
        if report is None:
            raise NotFound(
                f"kvedit: request {request_id[:200]!r}: expected the id of a recent request of "
                "this namespace, got an unknown one"
            )
        return report

    def find(self, request_id: str, namespace: str) -> dict[str, Any] | None:
        """The report, or None: for answers on their way to the client that sent the request."""
        return self._reports.get((namespace, request_id))
