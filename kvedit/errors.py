"""The errors that kvedit answers its callers with. One class per way a caller can be wrong.

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
    """An argument, body, option or setting breaks its rules; nothing was done."""

    status = 400


class Forbidden(KvEditError):
    """The caller has no right to it: an admin route, or a registration as an ordinary client."""

    status = 403


class NotFound(KvEditError):
    """Nothing of that name, number or request id is there for this namespace."""

    status = 404


class Conflict(KvEditError):
    """Other content has the name and was not to be replaced, or two things exclude each other."""

    status = 409


class QuotaExceeded(KvEditError):
    """A namespace has as many skills, tokens, registrations per minute or fields as it may."""

    status = 429


class Unavailable(KvEditError):
    """The server, or its scheduler, did not answer in time, or a compile did not finish."""

    status = 503


class PinBudgetExceeded(KvEditError):
    """A pin would hold more tokens than the share of the pool that pins may have."""

    status = 507


class Unsupported(KvEditError):
    """A model, pool or server configuration that kvedit does not serve. Holds all reasons."""

    def __init__(self, reasons: Sequence[str]) -> None:
        self.reasons: tuple[str, ...] = tuple(reasons)
        super().__init__("kvedit: unsupported configuration: " + "; ".join(self.reasons))


class UnsupportedRope(Unsupported):
    """Keys of this model that one rotation does not move: ALiBi, dynamic scaling, unknown types."""


class UnsupportedPool(Unsupported):
    """A KV pool whose rows cannot be copied: its type, layout or dtype is not served."""


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
