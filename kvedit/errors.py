"""Every error kvedit raises. One class per way a caller can be wrong.

    KvEditError                 500
    |-- BadRequest              400   (also a ValueError: the host turns it into a 400 by itself)
    |-- Forbidden               403
    |-- NotFound                404
    |-- Conflict                409
    |-- QuotaExceeded           429
    |-- Unavailable             503
    |-- PinBudgetExceeded       507
    `-- Unsupported                   a configuration kvedit refuses, with all reasons
        |-- UnsupportedRope
        `-- UnsupportedPool

Messages read ``kvedit: what: expected X, got Y``.
"""

from __future__ import annotations

from collections.abc import Sequence


class KvEditError(Exception):
    """Base class. ``status`` is the HTTP status a route answers with."""

    status: int = 500


class BadRequest(KvEditError, ValueError):
    status = 400


class Forbidden(KvEditError):
    status = 403


class NotFound(KvEditError):
    status = 404


class Conflict(KvEditError):
    status = 409


class QuotaExceeded(KvEditError):
    status = 429


class Unavailable(KvEditError):
    status = 503


class PinBudgetExceeded(KvEditError):
    status = 507


class Unsupported(KvEditError):
    """A model, pool or server configuration that kvedit does not serve. Holds all reasons."""

    def __init__(self, reasons: Sequence[str]) -> None:
        self.reasons: tuple[str, ...] = tuple(reasons)
        super().__init__("kvedit: unsupported configuration: " + "; ".join(self.reasons))


class UnsupportedRope(Unsupported):
    pass


class UnsupportedPool(Unsupported):
    pass


_BY_STATUS: dict[int, type[KvEditError]] = {
    cls.status: cls
    for cls in (
        BadRequest,
        Forbidden,
        NotFound,
        Conflict,
        QuotaExceeded,
        Unavailable,
        PinBudgetExceeded,
    )
}


def from_status(status: int, message: str) -> KvEditError:
    """The error that an answer with ``status`` stands for (used across the process boundary)."""
    return _BY_STATUS.get(status, KvEditError)(message)
