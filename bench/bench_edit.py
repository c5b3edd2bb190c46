"""Time to first token when a field has changed: every way to serve the turn, and a warm hit.

One server, one run. A prompt is [records][field][records][a question as the last line], 4,096
tokens and the question, with the field at 5 %, 50 % and 95 % of it. Its first turn is cached; the
second turn asks another question, and all arms but one say another value:

    exact         the value is unchanged: the reference, measured directly before every other arm
    full          nothing cached
    prefix        the host's own prefix cache: the prompt as sent, reuse ends at the field
    hoist         the prompt rewritten with the field at its end, both turns
    erratum, edit, edit+erratum      the strategies

The strategies know the earlier turn because the requests name their conversation, an option of
the request (a chat client that sends its history back needs none). Every arm answers which of
the two values holds (only these two are scored) in the request that is timed. A prompt's field
changes to four values, each from the first one; full and prefix run once per prompt. Counts are
checked against what the arm's layout implies; an arm that was served otherwise is WRONG.

    python bench/bench_edit.py [--reps N] [--positions 5,50,95] [--json] [--out FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edit_tasks import STATUSES
from real_server import TextIds, choose, fresh_salt

from kvedit.client import Client
from kvedit.workbench.model_store import default_model_dir
from kvedit.workbench.server_process import ServerProcess
from kvedit.workbench.timed_request import Streamed

NUM_PROMPT_TOKENS = 4096
POSITIONS = (5, 50, 95)  # percent
NUM_CHANGES = 4  # values that the field of one prompt changes to, each from the first one
FIELD, PATTERN = "order_status", "order_status: {value}"
REGION_TOKENS = NUM_PROMPT_TOKENS - 16  # any position above, and never the last line
STRATEGIES = ("erratum", "edit", "edit+erratum")
ARMS = ("exact", "full", "prefix", "hoist", *STRATEGIES)
TARGET_RATIO = 1.5  # erratum and edit against an exact hit
OFF = {"edits": "off"}
POOL_FLAGS = ("--max-total-tokens", "40000")


class Case:
    """One prompt, its field's first value and the values it changes to, and as many questions
    as are asked of it."""

    def __init__(self, texts: TextIds, percent: int, rep: int) -> None:
        rng = random.Random(f"kvedit edit {percent} {rep}")
        self.old, *changes = rng.sample(STATUSES, 1 + 2 * NUM_CHANGES)
        # Two strategies edit in place: with values in common, one would find the other's copies.
        self.changes, self.other_changes = changes[:NUM_CHANGES], changes[NUM_CHANGES:]
        self._encode = texts.encode
        records = texts.filler(f"records {percent} {rep}", NUM_PROMPT_TOKENS)
        position = NUM_PROMPT_TOKENS * percent // 100
        self._before, self._after = _split_at_line(texts, records, position)
        self._numbers = itertools.count(rng.randrange(100, 500))

    def choices(self, new: str) -> tuple[int, int]:
        """First tokens of the two answers, the old value's first."""
        return self._encode(f" {self.old}")[0], self._encode(f" {new}")[0]

    def prompt(self, value: str) -> list[int]:
        return self._before + self._field(value) + self._after + self._question()

    def hoisted(self, value: str) -> list[int]:
        return self._before + self._after + self._field(value) + self._question()

    @property
    def num_before(self) -> int:
        """Tokens before the field's line."""
        return len(self._before)

    def _field(self, value: str) -> list[int]:
        return self._encode(PATTERN.format(value=value) + "\n")

    def _question(self) -> list[int]:
        """The last line; no two alike, so none is cached."""
        number = next(self._numbers)
        return self._encode(f"Question {number}: what is the order_status? The order_status is")


def _split_at_line(
    texts: TextIds, records: list[int], position: int
) -> tuple[list[int], list[int]]:
    """Records around ``position``, cut behind a line break."""
    line_break = texts.encode("\n")[0]
    cut = next(i for i in range(position, len(records)) if records[i] == line_break) + 1
    end = max(i for i, token_id in enumerate(records) if token_id == line_break) + 1
    return records[:cut], records[cut:end]


@dataclass
class Measured:
    """All repetitions of one arm at one position; exact_s: of the hit measured directly before."""

    results: list[Streamed] = field(default_factory=list)
    exact_s: list[float] = field(default_factory=list)
    num_right: int = 0
    wrong: list[str] = field(default_factory=list)


class Repetition:
    """One case. What needs a prefill of its own runs once, the others once per change; each arm
    directly behind an exact hit."""

    def __init__(self, url: str, case: Case, measured: dict[str, Measured]) -> None:
        self._url, self._case, self._measured = url, case, measured
        self._salt, self._hoist_salt = fresh_salt(), fresh_salt()

    def run(self) -> None:
        case = self._case
        first = case.changes[0]
        self._send(case.prompt(case.old), self._salt, OFF, first)
        self._send(case.hoisted(case.old), self._hoist_salt, OFF, first)
        self._measure("full", first)
        for index, pair in enumerate(zip(case.changes, case.other_changes, strict=True)):
            order = ("hoist", *STRATEGIES)
            turn = index % len(order)
            for arm in (*order[turn:], *order[:turn]):
                self._measure(arm, pair[arm == "edit+erratum"])
        # The host's own hit leaves the new prompt cached as it is, and so comes last.
        self._measure("prefix", first)

    def _measure(self, arm: str, new: str) -> None:
        case = self._case
        ids = case.hoisted(new) if arm == "hoist" else case.prompt(new)
        salt = {"full": fresh_salt(), "hoist": self._hoist_salt}.get(arm, self._salt)
        options: dict[str, object] = dict(OFF)
        if arm in STRATEGIES:  # a conversation of its own for each change
            options = {"conversation": True, "strategy": arm}
            first, _ = self._send(case.prompt(case.old), salt, options, new)
            options["conversation"] = first.report["conversation"]
        exact, margin = self._send(case.prompt(case.old), self._salt, OFF, new)
        self._note("exact", exact, exact.ttft_s, -margin)
        result, margin = self._send(ids, salt, options, new)
        self._note(arm, result, exact.ttft_s, margin)

    def _send(
        self, ids: list[int], salt: str, options: dict[str, Any], new: str
    ) -> tuple[Streamed, float]:
        return choose(self._url, ids, self._case.choices(new), salt=salt, options=options)

    def _note(self, arm: str, result: Streamed, exact_s: float, margin: float) -> None:
        own = self._measured[arm]
        own.results.append(result)
        own.exact_s.append(exact_s)
        own.num_right += margin > 0
        own.wrong += wrong_counts(arm, result, self._case)


def wrong_counts(arm: str, result: Streamed, case: Case) -> list[str]:
    """What was served otherwise than the arm says."""
    report = result.report
    most = 64  # tokens: the question, the line and the window, generously
    expected = {
        "exact": report["exact"] > NUM_PROMPT_TOKENS - most and report["computed"] < most,
        "full": report["exact"] == 0 and report["composed"] == 0,
        "prefix": 0 <= report["exact"] - case.num_before < most and report["composed"] == 0,
        "hoist": report["exact"] > NUM_PROMPT_TOKENS - 2 * most and report["composed"] == 0,
    }
    edited, errata = len(report.get("edited", ())), len(report.get("errata", ()))
    strategies = {"erratum": (0, 1), "edit": (1, 0), "edit+erratum": (1, 1)}
    if arm in strategies:
        right = (edited, errata) == strategies[arm] and report["computed"] < most
    else:
        right = expected[arm] and (edited, errata) == (0, 0)
    return [] if right else [f"{arm}: served otherwise: {report}"]


def measure_position(
    url: str, texts: TextIds, percent: int, num_reps: int
) -> Iterator[dict[str, Any]]:
    """One row per arm for one position of the field."""
    measured = {arm: Measured() for arm in ARMS}
    for rep in range(num_reps):
        Repetition(url, Case(texts, percent, rep), measured).run()
    yield from (row_of(arm, percent, measured[arm]) for arm in ARMS)


def row_of(arm: str, percent: int, own: Measured) -> dict[str, Any]:
    ttft_s = [result.ttft_s for result in own.results]
    # Paired: neighbours in time share the load of the machine.
    ratio = statistics.median(a / b for a, b in zip(ttft_s, own.exact_s, strict=True))
    report = own.results[-1].report
    meets = ratio <= TARGET_RATIO if arm in ("erratum", "edit") else None
    return {
        "bench": "edit",
        "position_percent": percent,
        "arm": arm,
        "reps": len(ttft_s),
        "median_s": round(statistics.median(ttft_s), 4),
        "ratio_to_exact": round(ratio, 3),
        "prompt_tokens": own.results[-1].meta_info["prompt_tokens"],
        **{key: report[key] for key in ("exact", "composed", "copied", "derived")},
        # The most: a later change finds the beginning of an earlier change's line.
        "computed": max(result.report["computed"] for result in own.results),
        "num_right": own.num_right,
        "meets_target": meets,
        "wrong": own.wrong,
    }


def as_line(row: dict[str, Any]) -> str:
    target = {True: "", False: f"  above {TARGET_RATIO}", None: ""}[row["meets_target"]]
    wrong = f"  WRONG: {'; '.join(row['wrong'])}" if row["wrong"] else ""
    return (
        f"field at {row['position_percent']:2} %  {row['arm']:12} {row['median_s'] * 1e3:8.0f} ms  "
        f"{row['ratio_to_exact']:7.2f}x an exact hit  computed {row['computed']:5}  "
        f"composed {row['composed']:5}  right {row['num_right']}/{row['reps']}{target}{wrong}"
    )


def as_markdown(rows: Sequence[dict[str, Any]]) -> str:
    """One line per arm; for each position the ratio, the tokens computed and the right answers."""
    cells = {(row["arm"], row["position_percent"]): row for row in rows}
    positions = list(dict.fromkeys(row["position_percent"] for row in rows))
    head = " | ".join(f"field at {p} %: TTFT / exact hit, computed, right" for p in positions)
    lines = [f"| arm | {head} |", "|---" * (len(positions) + 1) + "|"]
    for arm in dict.fromkeys(row["arm"] for row in rows):
        found = [cells[arm, p] for p in positions]
        text = (
            f"{r['ratio_to_exact']:.2f}x, {r['computed']}, {r['num_right']}/{r['reps']}"
            for r in found
        )
        lines.append(f"| {arm} | {' | '.join(text)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    options = parse_arguments()
    model = options.model_path or default_model_dir()
    texts = TextIds(model)
    rows: list[dict[str, Any]] = []
    server = ServerProcess(["--model-path", str(model), *POOL_FLAGS], log_path=options.log)
    with server as url:
        Client(url).fields.add(FIELD, pattern=PATTERN, within=REGION_TOKENS, shared=True)
        warm_up(url, texts)
        for percent in options.positions:
            for row in measure_position(url, texts, percent, options.reps):
                rows.append(row)
                print(json.dumps(row) if options.json else as_line(row), flush=True)
    if options.out is not None:
        is_json = options.out.suffix == ".json"
        options.out.write_text(json.dumps(rows, indent=1) if is_json else as_markdown(rows))
    return 1 if any(row["wrong"] for row in rows) else 0


def warm_up(url: str, texts: TextIds) -> None:
    """Every path once: the first requests of a server pay for its compilations."""
    scrap = {arm: Measured() for arm in ARMS}
    Repetition(url, Case(texts, POSITIONS[-1], -1), scrap).run()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--reps", type=int, default=4, help="prompts per position")
    parser.add_argument("--positions", type=_positions, default=POSITIONS, help="percents")
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    parser.add_argument("--out", type=Path, help="also write a .json or .md file")
    parser.add_argument("--model-path", type=Path, help="default: the model of scripts/demo")
    parser.add_argument("--log", type=Path, default=Path("out/bench/edit-server.log"))
    return parser.parse_args()


def _positions(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
