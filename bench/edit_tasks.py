"""Look-up tasks whose answer hangs on one field: what the editing benches and tests score.

A case is a session with a field, short rules, a second field that has nothing to do with the
question, and a forced beginning of the answer. Two values of the field give two answers, and
only these two are scored. Every case has a customer number of its own near the start, so no two
cases share more than a few cached tokens.

    capital   the value is a country, the answer its capital
    copy      the value is an order status, the answer repeats it
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Encode = Callable[[str], "list[int]"]

CAPITALS = {
    "France": "Paris",
    "Italy": "Rome",
    "Germany": "Berlin",
    "Spain": "Madrid",
    "Japan": "Tokyo",
    "Egypt": "Cairo",
    "Greece": "Athens",
    "Russia": "Moscow",
    "Austria": "Vienna",
    "Ireland": "Dublin",
    "Portugal": "Lisbon",
    "Hungary": "Budapest",
}
STATUSES = (
    "shipped",
    "delivered",
    "cancelled",
    "pending",
    "returned",
    "refunded",
    "delayed",
    "lost in transit",
    "ready for pickup",
    "awaiting payment",
)
TIERS = ("silver", "gold", "basic", "premium")
RULES = (
    "Parcels above twenty kilograms travel by road.",
    "Gift wrapping costs two coins per box.",
    "Invoices are stored for seven years.",
    "Calls are answered between nine and five.",
    "Batteries are sent in separate boxes.",
    "Fragile goods carry a red label.",
    "Vouchers end on the last day of the year.",
    "Spare keys are kept by the front desk.",
)
NUM_RULES = 4
FIELD_REGION_TOKENS = 48  # the session block lies in them, the last line does not
KINDS = ("capital", "copy")
LABELS = {"capital": "country", "copy": "order_status"}
QUESTIONS = {
    "capital": ("Name the capital city of this customer's country.", "The capital city is"),
    "copy": ("State the status of this customer's order.", "The status of the order is"),
}


@dataclass(frozen=True, slots=True)
class Case:
    """A session about one customer. ``old``, ``new``, ``third``: values of the field, with
    answers of different first tokens; ``tiers``: two values of the field that does not matter."""

    kind: str
    number: int
    old: str
    new: str
    third: str
    tiers: tuple[str, str]
    rules: tuple[str, ...]

    @property
    def label(self) -> str:
        """The field's label in the prompt; its pattern is ``label: {value}``."""
        return LABELS[self.kind]

    def answer(self, value: str) -> str:
        """What follows the forced beginning of the answer."""
        return " " + (CAPITALS[value] if self.kind == "capital" else value)

    def session(self, value: str, tier: str | None = None) -> str:
        """The block with both fields, and the rules."""
        lines = (
            "SESSION",
            f"customer_number: {self.number}",
            f"{self.label}: {value}",
            f"customer_tier: {tier or self.tiers[0]}",
            "",
            "POLICY",
            *(f"- {rule}" for rule in self.rules),
        )
        return "\n".join(lines)

    @property
    def question(self) -> str:
        return QUESTIONS[self.kind][0]

    @property
    def opening(self) -> str:
        """The forced beginning of the answer."""
        return QUESTIONS[self.kind][1]

    def raw(self, value: str, tier: str | None = None) -> str:
        """The case as plain text; the last line is the beginning of the answer."""
        return f"{self.session(value, tier)}\n\nTASK\n{self.question}\n{self.opening}"

    def option_ids(self, encode: Encode) -> tuple[int, int]:
        """First token of the old value's answer and of the new one's."""
        return encode(self.answer(self.old))[0], encode(self.answer(self.new))[0]


def make_cases(kind: str, num_cases: int, encode: Encode, seed: int = 0) -> list[Case]:
    """Cases in pairs that swap old and new, so that neither answer is favoured."""
    rng = random.Random(f"kvedit look-up {kind} {seed}")
    values = list(CAPITALS) if kind == "capital" else list(STATUSES)
    numbers = rng.sample(range(10_000, 100_000), num_cases)
    cases: list[Case] = []
    while len(cases) < num_cases:
        old, new, third = rng.sample(values, 3)
        tiers = rng.sample(TIERS, 2)
        rules = tuple(rng.sample(RULES, NUM_RULES))
        for a, b in ((old, new), (new, old)):
            if len(cases) < num_cases:
                number = numbers[len(cases)]
                case = Case(kind, number, a, b, third, (tiers[0], tiers[1]), rules)
                _require_distinct(case, encode)
                cases.append(case)
    return cases


def _require_distinct(case: Case, encode: Encode) -> None:
    first = {encode(case.answer(value))[0] for value in (case.old, case.new, case.third)}
    if len(first) != 3:
        raise ValueError(
            f"kvedit: options of {case}: expected three different first tokens, got {len(first)}"
        )


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to serve a changed prompt. The conversation's first turn says ``case.old``; the
    second is the same prompt with other values, sent with ``options``.

    says           attribute of the case that the second turn's field says
    changes_tier   whether the field that does not matter is another one too
    num_edited     fields whose window is replaced in place; num_errata: lines
    """

    name: str
    options: dict[str, Any]
    says: str = "new"
    changes_tier: bool = False
    num_edited: int = 0
    num_errata: int = 0


EDIT, ERRATUM, BOTH = ({"strategy": s} for s in ("edit", "erratum", "edit+erratum"))
ARMS = (
    Arm("field only (edit)", EDIT, num_edited=1),
    Arm("edit, repair 16", {**EDIT, "repair": 16}, num_edited=1),
    Arm("edit, topk 16", {**EDIT, "topk": 16}, num_edited=1),
    Arm("erratum", ERRATUM, num_errata=1),
    Arm("edit+erratum", BOTH, num_edited=1, num_errata=1),
)
# Neither may bring the new answer: one line says a third value, the other is about another field.
CONTROLS = (
    Arm("control: wrong value", ERRATUM, says="third", num_errata=1),
    Arm("control: irrelevant", ERRATUM, says="old", changes_tier=True, num_errata=1),
)
OFF = {"edits": "off"}


@dataclass(frozen=True, slots=True)
class Scored:
    """margin: log odds of the new value's answer over the old one's. report: the token classes."""

    margin: float
    report: dict[str, Any]


class AnyCase(Protocol):
    """What an arm needs of a case; ``Case`` says what it is."""

    @property
    def old(self) -> str: ...
    @property
    def new(self) -> str: ...
    @property
    def tiers(self) -> tuple[str, str]: ...
    def raw(self, value: str, tier: str | None = None) -> str: ...
    def option_ids(self, encode: Encode) -> tuple[int, int]: ...


class Send(Protocol):
    """One request for one token. choices: ids of the old and the new answer."""

    def __call__(
        self, ids: list[int], *, salt: str, options: dict[str, Any], choices: tuple[int, int]
    ) -> Scored: ...


def declarations() -> list[dict[str, Any]]:
    """Arguments of ``client.fields.add`` for every field of the tasks, in every namespace."""
    return [
        {
            "name": label,
            "pattern": f"{label}: {{value}}",
            "within": FIELD_REGION_TOKENS,
            "shared": True,
        }
        for label in (*LABELS.values(), "customer_tier")
    ]


def run_arm(case: AnyCase, arm: Arm, encode: Encode, send: Send, salt: str) -> Scored:
    """Both turns of an arm; the second one's score. Raises ValueError if it was served
    otherwise than the arm says. ``salt``: a namespace that holds nothing of the new value yet
    (arms of one case may share it: each is a conversation of its own)."""
    choices = case.option_ids(encode)
    options: dict[str, Any] = {"conversation": True}
    first = send(encode(case.raw(case.old)), salt=salt, options=options, choices=choices)
    turn = {"conversation": first.report["conversation"]}
    tier = case.tiers[1] if arm.changes_tier else None
    ids = encode(case.raw(getattr(case, arm.says), tier))
    scored = send(ids, salt=salt, options={**turn, **arm.options}, choices=choices)
    served = len(scored.report["edited"]), len(scored.report["errata"])
    if served != (arm.num_edited, arm.num_errata):
        raise ValueError(
            f"kvedit: {arm.name}: expected (edited, errata) {(arm.num_edited, arm.num_errata)}, "
            f"got {served} with {scored.report['unedited']}"
        )
    return scored


@dataclass(frozen=True, slots=True)
class Summary:
    """accuracy: share of cases answered by the new value. recovery: mean of (s - stale) /
    (full - stale) over cases in which the two lie at least ``MIN_GAP`` apart; None without any."""

    num_cases: int
    accuracy: float
    recovery: float | None
    num_recovery: int


MIN_GAP = 1.0  # nats


def summarise(margins: Sequence[float], stale: Sequence[float], full: Sequence[float]) -> Summary:
    """One arm against the stale and the full prompt of the same cases."""
    kept = [
        (margin - s) / (f - s)
        for margin, s, f in zip(margins, stale, full, strict=True)
        if abs(f - s) >= MIN_GAP
    ]
    return Summary(
        num_cases=len(margins),
        accuracy=sum(margin > 0 for margin in margins) / len(margins),
        recovery=sum(kept) / len(kept) if kept else None,
        num_recovery=len(kept),
    )
