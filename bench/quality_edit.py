"""What a model answers when a field has changed: accuracy and recovery of each way to serve it.

Look-up tasks (see edit_tasks.py) on a real server, the two options scored only. Every arm is a
conversation of two turns in a namespace of its own: the first turn says the old value, the
second the new one. Stale is the first turn's score, full the second prompt's as it is.

    accuracy   share of cases in which the new value's answer is the likelier one
    recovery   (s - stale) / (full - stale), 0: acts on the old value, 1: as a full prefill
    distance   mean |s - score of the same arm with exact copies|, for the shift control

Two controls must not bring the new answer: a line that says a third value, and a line about
another field. The third rotates every copy one position too far: its scores must move away.

    python bench/quality_edit.py [--cases N] [--json] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from edit_tasks import (
    ARMS,
    CONTROLS,
    KINDS,
    Arm,
    Case,
    Scored,
    declarations,
    make_cases,
    run_arm,
    run_plain,
    summarise,
)
from real_server import TextIds, choose

from kvedit.client import Client
from kvedit.modelstore import default_model_dir
from kvedit.serverproc import ServerProcess
from kvedit.transport import HttpTransport

NUM_PARALLEL = 4
SHIFT_ERROR = 1  # positions
FLAGS = ("--max-total-tokens", "16384", "--random-seed", "1")


class Bench:
    """One model on one running server."""

    def __init__(self, url: str, texts: TextIds) -> None:
        self._url = url
        self._encode = texts.encode
        self._transport = HttpTransport(url, None, timeout_s=600.0)

    def declare(self) -> None:
        fields = Client(self._url).fields
        for body in declarations():
            where = body.pop("where")
            fields.add(**body, **where)

    def rows_of(self, kind: str, num_cases: int) -> list[dict[str, Any]]:
        cases = make_cases(kind, num_cases, self._encode)
        stale = self._margins(cases, lambda case: self._plain(case, case.old))
        full = self._margins(cases, lambda case: self._plain(case, case.new))
        rows = [_row(kind, "stale", stale, stale, full), _row(kind, "full", full, stale, full)]
        margins = {arm.name: self._of_arm(cases, arm) for arm in (*ARMS, *CONTROLS)}
        rows += [_row(kind, name, own, stale, full) for name, own in margins.items()]
        edit = ARMS[0]
        shifted = self._shifted(cases, edit)
        again = self._of_arm(cases, edit)
        row = _row(kind, f"control: edit, shift + {SHIFT_ERROR}", shifted, stale, full)
        row["distance"] = _distance(shifted, margins[edit.name])
        rows.append(row)
        row = _row(kind, "edit once more", again, stale, full)
        row["distance"] = _distance(again, margins[edit.name])
        return [*rows, row]

    def _of_arm(self, cases: Sequence[Case], arm: Arm) -> list[float]:
        return self._margins(cases, lambda case: run_arm(case, arm, self._encode, self._send))

    def _shifted(self, cases: Sequence[Case], arm: Arm) -> list[float]:
        self._set_shift_error(SHIFT_ERROR)
        try:
            return self._of_arm(cases, arm)
        finally:
            self._set_shift_error(0)

    def _set_shift_error(self, positions: int) -> None:
        command = {"op": "shift_error", "positions": positions}
        self._transport.request("POST", "/kvedit/testing", {}, command)

    def _plain(self, case: Case, value: str) -> Scored:
        return run_plain(case, value, self._encode, self._send)

    def _margins(self, cases: Sequence[Case], run: Callable[[Case], Scored]) -> list[float]:
        with ThreadPoolExecutor(NUM_PARALLEL) as threads:
            return [scored.margin for scored in threads.map(run, cases)]

    def _send(
        self, ids: list[int], *, salt: str, options: dict[str, Any], choices: tuple[int, int]
    ) -> Scored:
        streamed, margin = choose(self._url, ids, choices, salt=salt, options=options)
        return Scored(margin, streamed.report)


def _distance(margins: Sequence[float], reference: Sequence[float]) -> float:
    pairs = zip(margins, reference, strict=True)
    return round(sum(abs(a - b) for a, b in pairs) / len(reference), 3)


def _row(
    kind: str, arm: str, margins: list[float], stale: list[float], full: list[float]
) -> dict[str, Any]:
    summary = summarise(margins, stale, full)
    return {
        "bench": "quality_edit",
        "task": kind,
        "arm": arm,
        "cases": summary.num_cases,
        "accuracy": round(summary.accuracy, 3),
        "recovery": None if summary.recovery is None else round(summary.recovery, 3),
        "recovery_cases": summary.num_recovery,
        "margin": round(sum(margins) / len(margins), 3),
    }


def as_line(row: dict[str, Any]) -> str:
    recovery = "     -" if row["recovery"] is None else f"{row['recovery']:6.2f}"
    distance = f"  distance {row['distance']:.3f}" if "distance" in row else ""
    return (
        f"{row['task']:8} {row['arm']:24} accuracy {row['accuracy']:.2f}  recovery {recovery}  "
        f"mean margin {row['margin']:6.2f}  n {row['cases']} ({row['recovery_cases']}){distance}"
    )


def as_markdown(rows: Sequence[dict[str, Any]]) -> str:
    """One line per arm, accuracy / recovery per task."""
    cells = {(row["arm"], row["task"]): row for row in rows}
    arms = dict.fromkeys(row["arm"] for row in rows)
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    lines = ["| arm | " + " | ".join(f"{task}: accuracy / recovery" for task in tasks) + " |"]
    lines.append("|---" * (len(tasks) + 1) + "|")
    for arm in arms:
        found = [cells[arm, task] for task in tasks]
        lines.append(
            f"| {arm} | "
            + " | ".join(f"{row['accuracy']:.2f} / {row['recovery']}" for row in found)
            + " |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    options = parse_arguments()
    model = options.model_path or default_model_dir()
    texts = TextIds(model)
    rows: list[dict[str, Any]] = []
    server = ServerProcess(
        ["--model-path", str(model), *FLAGS], env={"KVEDIT_TESTING": "1"}, log_path=options.log
    )
    with server as url:
        bench = Bench(url, texts)
        bench.declare()
        for kind in KINDS:
            for row in bench.rows_of(kind, options.cases):
                rows.append(row)
                print(json.dumps(row) if options.json else as_line(row), flush=True)
    if options.out is not None:
        is_json = options.out.suffix == ".json"
        options.out.write_text(json.dumps(rows, indent=1) if is_json else as_markdown(rows))
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=40, help="cases per task")
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    parser.add_argument("--out", type=Path, help="also write a .json or .md file")
    parser.add_argument("--model-path", type=Path, help="default: the model of scripts/demo")
    parser.add_argument("--log", type=Path, default=Path("out/bench/quality-edit-server.log"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
