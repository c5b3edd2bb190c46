"""The demo from start to end: server up, documents compiled, questions asked, report written."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kvedit.client import Client
from kvedit.errors import KvEditError
from kvedit.workbench.demo.arms import FULL, SPLICE, Row, problems_of, run_cases
from kvedit.workbench.demo.cases import CASES, SKILL_NAMES, load_text
from kvedit.workbench.demo.report import render_report
from kvedit.workbench.demo.table import format_table
from kvedit.workbench.model_store import ModelStoreError, default_model_dir
from kvedit.workbench.server_process import ServerFailed, ServerProcess

OK, VOID, FAILED = 0, 1, 2
# So long that a skill shorter than this would say nothing about the documents people prefill.
MIN_SKILL_TOKENS = 1500


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo. Returns 0, 1 when the comparison is void, 2 when the server fails."""
    args = _parser().parse_args(argv)
    try:
        model = args.model_path or default_model_dir()
        args.out.mkdir(parents=True, exist_ok=True)
        server = ServerProcess(
            ["--model-path", str(model)], log_path=args.out / "server.log", port=args.port
        )
        with server as url:
            rows, skills = run(url)
    except (KvEditError, ModelStoreError, ServerFailed, OSError) as error:
        print(f"demo failed: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("demo interrupted; the server is stopped", file=sys.stderr)
        return 130
    problems = problems_of(rows)
    write_files(args.out, rows, facts_of(rows, skills, model), problems)
    print(summary(rows))
    print(f"report: {args.out / 'report.html'}")
    for problem in problems:
        print(problem, file=sys.stderr)
    return VOID if problems else OK


def run(url: str) -> tuple[list[Row], list[dict[str, Any]]]:
    """Compile the documents and ask all cases on the server at `url`; prints the table."""
    skills = [register(url, name) for name in SKILL_NAMES]
    rows = []
    for row in run_cases(url, CASES):
        print(f"case {row.case} of {len(CASES)}, {row.arm}: {row.ttft_s:.2f} s", file=sys.stderr)
        rows.append(row)
    print(format_table(rows))
    return rows, skills


def register(url: str, name: str) -> dict[str, Any]:
    """Compile one document for all namespaces and hold it in the cache."""
    skill = Client(url).register(name, text=load_text(name), shared=True, pin=True)
    if skill["num_tokens"] < MIN_SKILL_TOKENS:
        raise KvEditError(
            f"kvedit: skill {name}: expected at least {MIN_SKILL_TOKENS} tokens, "
            f"got {skill['num_tokens']}"
        )
    print(f"skill {name}: {skill['num_tokens']} tokens, {skill['state']}", file=sys.stderr)
    return skill


def write_files(
    out: Path, rows: Sequence[Row], facts: dict[str, str], problems: Sequence[str]
) -> None:
    """report.html and results.json, from the same rows."""
    (out / "report.html").write_text(render_report(rows, facts, problems), encoding="utf-8")
    results = {"facts": facts, "problems": problems, "rows": [row.to_json() for row in rows]}
    (out / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def facts_of(rows: Sequence[Row], skills: Sequence[dict[str, Any]], model: Path) -> dict[str, str]:
    """What a reader needs to judge the numbers."""
    sizes = ", ".join(f"{skill['name']} {skill['num_tokens']} tokens" for skill in skills)
    return {
        "Model": model.name,
        "Server": f"SGLang {version('sglang')} with kvedit {version('kvedit')}",
        "Compiled once": sizes,
        "Result": summary(rows),
    }


def summary(rows: Sequence[Row]) -> str:
    """The totals in one sentence."""
    full = [row for row in rows if row.arm == FULL]
    spliced = [row for row in rows if row.arm == SPLICE]
    ratio = sum(row.ttft_s for row in full) / sum(row.ttft_s for row in spliced)
    return (
        f"{sum(row.right for row in full)} of {len(full)} answers right with full prefill, "
        f"{sum(row.right for row in spliced)} with splices, "
        f"{sum(row.same_as_full for row in spliced)} the same in both; "
        f"first token {ratio:.1f}x sooner over all questions"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvedit.workbench.demo",
        description="Ask a real server questions about two documents: full prefill against "
        "splices of the documents compiled once. Writes report.html, results.json, server.log.",
    )
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="folder for results")
    parser.add_argument("--port", type=int, default=0, help="port of the server (0: a free one)")
    parser.add_argument(
        "--model-path", type=Path, help="model folder (default: the one scripts/demo fetches)"
    )
    return parser
