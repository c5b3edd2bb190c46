"""What a model answers when a field has changed: accuracy and recovery of each way to serve it.

Look-up tasks (see edit_tasks.py) on a real server, the two options scored only. Every arm is a
conversation of two turns in a namespace of its own: the first turn says the old value, the
second the new one. Stale is the first turn's score, full the second prompt's as it is.

    accuracy   share of cases in which the new value's answer is the likelier one
    recovery   (s - stale) / (full - stale), 0: acts on the old value, 1: as a full prefill
    distance   mean |s - score of the first arm|: shows what wrong copies do

Two controls must not bring the new answer: a line that says a third value, and a line about
another field. The third rotates every copy one position too far: its scores must move away.

--code asks for decisions in code form instead (see code_tasks.py), of a model that has to be
fetched first: scripts/fetch_model --model code.

    python bench/quality_edit.py [--code] [--cases N] [--json] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from code_tasks import CodeCase, code_declaration, make_code_cases
from edit_tasks import (
    ARMS,
    CONTROLS,
    KINDS,
    OFF,
    Arm,
    Case,
    Encode,
    Scored,
    declarations,
    make_cases,
    run_arm,
    summarise,
)
from real_server import TextIds, choose, fresh_salt

from kvedit.client import Client
from kvedit.client.transport import HttpTransport
from kvedit.workbench.code_model import code_model_dir
from kvedit.workbench.model_store import default_model_dir
from kvedit.workbench.server_process import ServerProcess

AnyCase = Case | CodeCase
NUM_PARALLEL = 4
SHIFT_ERROR = 1  # positions
FLAGS = ("--max-total-tokens", "16384", "--random-seed", "1")


class Bench:
    """The cases of one task on one running server."""

    def __init__(self, url: str, encode: Encode, kind: str, cases: Sequence[AnyCase]) -> None:
        self._url, self._encode = url, encode
        self._kind, self._cases = kind, cases
        self._fields = Client(url).fields
        self._transport = HttpTransport(url, None, timeout_s=600.0)

    def rows(self, arms: Sequence[Arm]) -> Iterator[dict[str, Any]]:
        """A row per arm; the first arm again with exact and with wrong copies."""
        edit = arms[0]
        salts = self._namespaces()
        margins = {
            "stale": self._each(lambda case: self._plain(case, case.old, salts[case.number])),
            "full": self._each(lambda case: self._plain(case, case.new, fresh_salt())),
        }
        stale, full = margins["stale"], margins["full"]
        for arm in arms:
            margins[arm.name] = self._margins_of(arm, salts)
        margins["edit once more"] = self._margins_of(edit, self._namespaces())
        with self._wrong_copies():
            shifted = self._margins_of(edit, self._namespaces())
        margins[f"control: edit, shift + {SHIFT_ERROR}"] = shifted
        for name, own in margins.items():
            row = _row(self._kind, name, own, stale, full)
            row["distance"] = _distance(own, margins[edit.name])
            yield row

    def _namespaces(self) -> dict[int, str]:
        """A fresh one for each case, with the case's field where that is not a shared one."""
        salts = {case.number: fresh_salt() for case in self._cases}
        for case in self._cases:
            if isinstance(case, CodeCase):
                body = code_declaration(case, self._encode)
                self._fields.add(**body, namespace=salts[case.number])
        return salts

    def _margins_of(self, arm: Arm, salts: dict[int, str]) -> list[float]:
        return self._each(
            lambda case: run_arm(case, arm, self._encode, self._send, salts[case.number])
        )

    def _plain(self, case: AnyCase, value: str, salt: str) -> Scored:
        choices = case.option_ids(self._encode)
        return self._send(self._encode(case.raw(value)), salt=salt, options=OFF, choices=choices)

    def _each(self, run: Callable[[AnyCase], Scored]) -> list[float]:
        with ThreadPoolExecutor(NUM_PARALLEL) as threads:
            return [scored.margin for scored in threads.map(run, self._cases)]

    @contextmanager
    def _wrong_copies(self) -> Iterator[None]:
        self._set_shift_error(SHIFT_ERROR)
        try:
            yield
        finally:
            self._set_shift_error(0)

    def _set_shift_error(self, positions: int) -> None:
        command = {"op": "shift_error", "positions": positions}
        self._transport.request("POST", "/kvedit/testing", {}, command)

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
    recovery = "    -" if row["recovery"] is None else f"{row['recovery']:5.2f}"
    return (
        f"{row['task']:8} {row['arm']:24} accuracy {row['accuracy']:.2f}  recovery {recovery}  "
        f"margin {row['margin']:6.2f}  distance {row['distance']:5.2f}  "
        f"n {row['cases']} ({row['recovery_cases']})"
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
    model = options.model_path or (code_model_dir() if options.code else default_model_dir())
    encode = TextIds(model).encode
    rows: list[dict[str, Any]] = []
    server = ServerProcess(
        ["--model-path", str(model), *FLAGS], env={"KVEDIT_TESTING": "1"}, log_path=options.log
    )
    with server as url:
        for bench, arms in benches(url, encode, options):
            for row in bench.rows(arms):
                rows.append(row)
                print(json.dumps(row) if options.json else as_line(row), flush=True)
    if options.out is not None:
        is_json = options.out.suffix == ".json"
        options.out.write_text(json.dumps(rows, indent=1) if is_json else as_markdown(rows))
    return 0


def benches(
    url: str, encode: Encode, options: argparse.Namespace
) -> Iterator[tuple[Bench, Sequence[Arm]]]:
    if options.code:
        yield Bench(url, encode, "code", make_code_cases(options.cases)), ARMS
        return
    for body in declarations():
        Client(url).fields.add(**body)
    for kind in KINDS:
        yield Bench(url, encode, kind, make_cases(kind, options.cases, encode)), ARMS + CONTROLS


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=40, help="cases per task")
    parser.add_argument("--code", action="store_true", help="decisions in code form (slow)")
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    parser.add_argument("--out", type=Path, help="also write a .json or .md file")
    parser.add_argument("--model-path", type=Path, help="default: the model of scripts/demo")
    parser.add_argument("--log", type=Path, default=Path("out/bench/quality-edit-server.log"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
