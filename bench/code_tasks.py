"""Decisions in code form: the answer follows from a field by a rule that the prompt states.

Unlike look-ups, a model that reads the rules has drawn its conclusion before the last line: the
tokens behind the field decide, the field itself hardly does. Small models are at chance here;
a 1.5B model of code decides, four solved episodes first, one of them with an update line.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Encode = Callable[[str], "list[int]"]

DOMAINS = {
    "ticket": ("expired", "valid"),
    "role": ("guest", "admin"),
    "plan": ("free", "paid"),
    "weather": ("storm", "clear"),
    "badge": ("red", "green"),
    "door": ("locked", "open"),
    "battery": ("low", "full"),
    "seat": ("taken", "empty"),
    "account": ("blocked", "active"),
    "visa": ("denied", "granted"),
}
NUM_EPISODES = 4
NUM_HEAD_TOKENS = 64  # of the last episode; more than its field line needs
UPDATE = '{label}{value}"  # update: overrides the value above'
FILLERS = ("# checked once per day", "# see the handbook for details")


@dataclass(frozen=True, slots=True)
class CodeCase:
    """Same face as ``edit_tasks.Case``, for arms that change nothing but the field."""

    number: int
    label: str
    old: str
    new: str
    episodes: tuple[str, ...]
    tiers: tuple[str, str] = ("", "")

    def raw(self, value: str, tier: str | None = None) -> str:
        return "\n\n".join((*self.episodes, "\n".join(_episode(self.number, self.label, value))))

    def answer(self, value: str) -> str:
        return " " + _rules(self.label)[value]

    def option_ids(self, encode: Encode) -> tuple[int, int]:
        return encode(self.answer(self.old))[0], encode(self.answer(self.new))[0]


def _rules(label: str) -> dict[str, str]:
    """As one expects them: with the answers swapped, the model decides wrongly too often."""
    bad, good = DOMAINS[label]
    return {bad: "no", good: "yes"}


def _episode(number: int, label: str, value: str) -> tuple[str, str]:
    """Everything but the last line, and the last line without its answer."""
    rules = ", ".join(f'"{v}": "{a}"' for v, a in _rules(label).items())
    lines = (
        f"# id {number}",
        f'{label} = "{value}"',
        "# what the rules print",
        f"rules = {{{rules}}}",
        *FILLERS,
    )
    return "\n".join(lines), f"print(rules[{label}])  # prints"


def make_code_cases(num_cases: int, seed: int = 0) -> list[CodeCase]:
    """Both answers equally often. The solved episodes are of other fields, one was updated."""
    rng = random.Random(f"kvedit code {seed}")
    numbers = iter(rng.sample(range(1000, 10_000), num_cases * (NUM_EPISODES + 1)))
    cases = []
    for index in range(num_cases):
        label, *others = rng.sample(list(DOMAINS), NUM_EPISODES + 1)
        updated = rng.randrange(NUM_EPISODES)
        episodes = tuple(
            _solved(next(numbers), other, rng, with_update=i == updated)
            for i, other in enumerate(others)
        )
        old, new = DOMAINS[label] if index % 2 else reversed(DOMAINS[label])
        cases.append(CodeCase(next(numbers), label, old, new, episodes))
    return cases


def _solved(number: int, label: str, rng: random.Random, *, with_update: bool) -> str:
    first, second = rng.sample(DOMAINS[label], 2)
    head, last = _episode(number, label, first)
    if with_update:
        update = UPDATE.replace("{label}", f'{label} = "').replace("{value}", second)
        head = f"{head}\n{update}"
    value = second if with_update else first
    return f"{head}\n{last} {_rules(label)[value]}"


def code_declaration(case: CodeCase, encode: Encode) -> dict[str, Any]:
    """Arguments of ``client.fields.add`` for one case: the region ends inside its last episode."""
    before = encode("\n\n".join(case.episodes) + "\n\n")
    head = encode(_episode(case.number, case.label, case.old)[0])
    return {
        "name": case.label,
        "pattern": f'{case.label} = "{{value}}"',
        "template": UPDATE,
        "within": len(before) + min(NUM_HEAD_TOKENS, len(head)),
    }
