"""The three ways in which the demo serves every question, and what it records about each.

    full prefill   a cache salt of its own and splicing switched off: an ordinary, complete prefill
    splice         another fresh salt: nothing is cached but the compiled documents
    repeat         the spliced prompt once more under the same salt, as a second client sends it

All three run on one server, so they share its model, attention and load.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvedit.workbench.demo.cases import Case, is_right, prompt_of
from kvedit.workbench.timed_request import Streamed, stream_generate

FULL, SPLICE, REPEAT = "full prefill", "splice", "repeat"
ARMS = (FULL, SPLICE, REPEAT)
NUM_ANSWER_TOKENS = 8
SPLICE_OFF = {"kvedit": {"splice": "off"}}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. Token counts are the server's own report; ttft_s in seconds."""

    case: int
    layout: str
    question: str
    arm: str
    prompt_tokens: int
    exact: int
    composed: int
    derived: int
    computed: int
    copied: int
    ttft_s: float
    answer: str
    right: bool
    same_as_full: bool

    def to_json(self) -> dict[str, Any]:
        """As results.json holds it: the fields by name."""
        return asdict(self)


def run_cases(url: str, cases: Sequence[Case]) -> Iterator[Row]:
    """Ask every case in every arm, the arms of one case directly after each other."""
    _warm_up(url)
    for number, case in enumerate(cases, start=1):
        full = ask(url, prompt_of(case), salt=fresh_salt(), splice=False)
        salt = fresh_salt()
        spliced = ask(url, prompt_of(case), salt=salt, splice=True)
        repeated = ask(url, prompt_of(case), salt=salt, splice=True)
        for arm, result in ((FULL, full), (SPLICE, spliced), (REPEAT, repeated)):
            yield row_of(number, case, arm, result, full)


def ask(url: str, prompt: str, *, salt: str, splice: bool) -> Streamed:
    """One greedy answer of NUM_ANSWER_TOKENS tokens, timed."""
    sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": NUM_ANSWER_TOKENS}
    if not splice:
        sampling["custom_params"] = SPLICE_OFF
    return stream_generate(url, {"text": prompt, "cache_salt": salt, "sampling_params": sampling})


def row_of(number: int, case: Case, arm: str, result: Streamed, full: Streamed) -> Row:
    """The table row of one result; `full` is the full prefill of the same case."""
    report = result.report
    return Row(
        case=number,
        layout=case.title,
        question=f"{case.question} {case.lead}",
        arm=arm,
        prompt_tokens=result.meta_info["prompt_tokens"],
        exact=report["exact"],
        composed=report["composed"],
        derived=report["derived"],
        computed=report["computed"],
        copied=report["copied"],
        ttft_s=result.ttft_s,
        answer=first_line(result.text),
        right=is_right(case, result.text),
        same_as_full=first_line(result.text) == first_line(full.text),
    )


def problems_of(rows: Sequence[Row]) -> list[str]:
    """What makes the comparison void, as sentences; empty when it stands."""
    problems = []
    if not any(row.composed for row in rows if row.arm == SPLICE):
        problems.append("kvedit: splice arm: expected composed tokens, got none")
    for row in rows:
        classes = row.exact + row.composed + row.derived + row.computed
        where = f"kvedit: case {row.case}, {row.arm}"
        if classes != row.prompt_tokens:
            problems.append(f"{where}: expected {row.prompt_tokens} classed tokens, got {classes}")
        if row.arm == FULL and row.computed != row.prompt_tokens:
            problems.append(f"{where}: expected every token computed, got {row.computed}")
    return problems


def first_line(text: str) -> str:
    """The answer proper: the model goes on with other text behind a line break."""
    lines = text.strip().splitlines()
    return lines[0].strip() if lines else ""


def fresh_salt() -> str:
    """A cache salt that no request has used."""
    return f"demo-{uuid.uuid4().hex}"


def _warm_up(url: str) -> None:
    """The first request of a server pays for lazy imports and allocations; none of ours may."""
    ask(url, "Warm-up. " * 40, salt=fresh_salt(), splice=False)
