"""How much clients may register: skills, tokens and registrations per minute, per namespace."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvedit.errors import QuotaExceeded

WINDOW_S = 60.0


@dataclass(slots=True)
class _Account:
    num_tokens: dict[str, int] = field(default_factory=dict)  # by skill name
    stamps: deque[float] = field(default_factory=deque)  # of registrations in the window


@dataclass(frozen=True, slots=True)
class Reservation:
    """What ``cancel`` needs to undo one ``admit``."""

    namespace: str
    name: str
    before: int | None  # tokens of the skill that had the name


class QuotaBook:
    """``clock`` returns seconds and never goes back (time.monotonic)."""

    def __init__(
        self,
        *,
        max_skills: int,
        max_tokens: int,
        rate_per_minute: int,
        clock: Callable[[], float],
    ) -> None:
        self._max_skills = max_skills
        self._max_tokens = max_tokens
        self._rate_per_minute = rate_per_minute
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    def admit(self, namespace: str, name: str, num_tokens: int) -> Reservation:
        """Reserve room for a skill; the same name again takes the place of the old one.

        Raises QuotaExceeded with every limit that is in the way; then nothing is reserved, and
        the attempt does not count towards the rate.
        """
        now = self._clock()
        self._forget_before(now - WINDOW_S)
        account = self._accounts.get(namespace, _Account())
        reasons = self._reasons(account, name, num_tokens)
        if reasons:
            raise QuotaExceeded("kvedit: quota: " + "; ".join(reasons))
        self._accounts[namespace] = account
        account.stamps.append(now)
        before = account.num_tokens.get(name)
        account.num_tokens[name] = num_tokens
        return Reservation(namespace, name, before)

    def cancel(self, reservation: Reservation) -> None:
        """The registration did not happen: give its room back (its turn in the rate is spent)."""
        if reservation.before is None:
            self.release(reservation.namespace, reservation.name)
        else:
            held = self._accounts[reservation.namespace].num_tokens
            held[reservation.name] = reservation.before

    def release(self, namespace: str, name: str) -> None:
        """The skill was removed. A name without a reservation (an admin's skill) is no error."""
        account = self._accounts.get(namespace)
        if account is not None:
            account.num_tokens.pop(name, None)

    def held(self, namespace: str) -> Mapping[str, int]:
        """Tokens by skill name."""
        account = self._accounts.get(namespace)
        return {} if account is None else dict(account.num_tokens)

    def _reasons(self, account: _Account, name: str, num_tokens: int) -> list[str]:
        others = {n: t for n, t in account.num_tokens.items() if n != name}
        num_skills = len(others) + 1
        total = sum(others.values()) + num_tokens
        reasons = []
        if num_skills > self._max_skills:
            reasons.append(f"skills: expected at most {self._max_skills}, got {num_skills}")
        if total > self._max_tokens:
            reasons.append(f"tokens: expected at most {self._max_tokens}, got {total}")
        if len(account.stamps) >= self._rate_per_minute:
            reasons.append(
                f"rate: expected at most {self._rate_per_minute} registrations per minute, "
                f"got {len(account.stamps) + 1}"
            )
        return reasons

    def _forget_before(self, start: float) -> None:
        """Drop old stamps and empty accounts: clients may invent namespaces without end."""
        for namespace, account in list(self._accounts.items()):
            while account.stamps and account.stamps[0] <= start:
                account.stamps.popleft()
            if not account.stamps and not account.num_tokens:
                del self._accounts[namespace]
