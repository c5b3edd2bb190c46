"""What the examples share: a server for the time of the program, and the table of its requests."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvedit import lang
from kvedit.workbench.model_store import default_model_dir
from kvedit.workbench.server_process import ServerProcess

CLASSES = ("exact", "composed", "derived", "computed")
MAX_ANSWER_CHARS = 44


def parsed_arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--url", help="a running server (default: one of its own, on the CPU)")
    parser.add_argument("--api-key", help="key of that server")
    parser.add_argument("--admin-api-key", help="its admin key, which registering needs")
    parser.add_argument(
        "--model-path", type=Path, help="model of the server it starts (default: the fetched one)"
    )
    return parser.parse_args()


@contextmanager
def endpoint(args: argparse.Namespace, name: str) -> Iterator[lang.Endpoint]:
    """The server as a backend. Requests and texts of the example share one namespace, its own."""
    salt = f"kvedit-example-{name}"
    if args.url:
        yield lang.Endpoint(args.url, args.api_key, args.admin_api_key, cache_salt=salt)
        return
    model = args.model_path or default_model_dir()
    log_path = Path("out/examples") / f"{name}.log"
    with ServerProcess(["--model-path", str(model)], log_path=log_path) as url:
        yield lang.Endpoint(url, cache_salt=salt)


def register(backend: lang.Endpoint, **texts: Any) -> None:
    """`lang.register`; says on stderr what the server did not take."""
    done = lang.register(backend, **texts)
    for name, view in done.skills.items():
        print(f"skill {name}: {view['num_tokens']} tokens, {view['state']}", file=sys.stderr)
    for name in done.fields:
        print(f"field {name}: declared", file=sys.stderr)
    for name, reason in done.refused.items():
        print(f"{name} is plain text: {reason}", file=sys.stderr)


class Steps:
    """One row for each request; the token classes are the server's own report."""

    def __init__(self) -> None:
        self._rows: list[tuple[str, ...]] = []
        self._prompt = self._computed = 0

    def add(self, step: str, state: Any, variable: str) -> str:
        """Take the request that made ``variable``. Returns the generated text.

        Raises NotFound when the request failed, RuntimeError when its report does not add up or the
        server makes none.
        """
        report = lang.report(state, variable)
        if report is None:
            raise RuntimeError("kvedit: report: expected a server with kvedit, got none")
        split = [report[name] for name in CLASSES]
        num_prompt = state.get_meta_info(variable)["prompt_tokens"]
        if sum(split) != num_prompt:
            raise RuntimeError(f"kvedit: report: expected {num_prompt} tokens, got {sum(split)}")
        self._prompt += num_prompt
        self._computed += report["computed"]
        answer = " ".join(state[variable].split())[:MAX_ANSWER_CHARS]
        self._rows.append((step, str(num_prompt), *map(str, split), changed_by(report), answer))
        return state[variable]

    def print(self) -> None:
        rows = [("step", "prompt", *CLASSES, "changed by", "answer"), *self._rows]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        numbers = range(1, 2 + len(CLASSES))
        for row in rows:
            cells = enumerate(zip(row, widths, strict=True))
            line = (c.rjust(w) if i in numbers else c.ljust(w) for i, (c, w) in cells)
            print("  ".join(line).rstrip())
        print(f"computed {self._computed} of {self._prompt} prompt tokens")


def changed_by(report: dict[str, Any]) -> str:
    """What a field that changed since the turn before led to: an edit in place, a line at the end.

    A report tells only where a field stands in the prompt.
    """
    done = ["edit"] if report.get("edited") else []
    done += ["line"] if report.get("errata") else []
    return " + ".join(done) or "-"
