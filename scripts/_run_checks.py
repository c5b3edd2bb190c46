"""Lint, types and all tests, in the processes they need; started by scripts/test in .venv."""

from __future__ import annotations

import os
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from _processes import adopt_orphans, interrupt_on_termination, run_to_end

REPO_ROOT = Path(__file__).resolve().parent.parent
OWN_PROCESS_MARK = "pytest.mark.own_process"
NO_TESTS_COLLECTED = 5
OPTIONS_WITH_A_VALUE = {"-k", "-m", "-n", "-p", "-o", "-c"}

STATIC_CHECKS = {
    "ruff check": ["ruff", "check", "."],
    "ruff format": ["ruff", "format", "--check", "."],
    "mypy": ["mypy"],
}


@dataclass
class Options:
    """What the command line asks for; ``targets`` are test files, folders or node ids."""

    fast: bool = False
    long: bool = False
    targets: list[str] = field(default_factory=list)
    pytest_args: list[str] = field(default_factory=list)


@dataclass
class Totals:
    """Counts over all groups, and the seconds each test file took."""

    passed: int = 0
    failures: list[str] = field(default_factory=list)
    seconds_of: Counter[str] = field(default_factory=Counter)


def main(arguments: list[str]) -> int:
    os.chdir(REPO_ROOT)
    adopt_orphans()
    interrupt_on_termination()
    options = parse(arguments)
    totals = Totals()
    try:
        run_static_checks(totals)
        for group in test_groups(options):
            run_group(group, options, totals)
    except KeyboardInterrupt:
        print("\n==> interrupted; everything that was started has been stopped", flush=True)
        return 130
    report(totals)
    return 1 if totals.failures or not totals.passed else 0


def parse(arguments: list[str]) -> Options:
    options = Options()
    for before, argument in zip(["", *arguments], arguments, strict=False):
        if before in OPTIONS_WITH_A_VALUE:  # `-k kvedit` means names, not the folder
            options.pytest_args.append(argument)
        elif argument == "--fast":
            options.fast = True
        elif argument == "--long":
            options.long = True
        elif not argument.startswith("-") and Path(argument.partition("::")[0]).exists():
            options.targets.append(argument)
        else:
            options.pytest_args.append(argument)
    if options.fast and options.long:
        raise SystemExit("kvedit: scripts/test: expected --fast or --long, got both")
    return options


def run_static_checks(totals: Totals) -> None:
    for name, command in STATIC_CHECKS.items():
        say(name)
        if run_to_end([sys.executable, "-m", *command], environment()) != 0:
            totals.failures.append(name)


def test_groups(options: Options) -> list[list[str]]:
    """Return lists of targets, one pytest process each: plain tests, kernels, then servers.

    Triton reads TRITON_INTERPRET at import, so interpreted and compiled kernels cannot share a
    process; the server tests share one, and with it the servers it starts.
    """
    targets = [part for target in options.targets or ["tests"] for part in expand(target)]
    targets = list(dict.fromkeys(targets))
    if options.fast:
        targets = [target for target in targets if not in_folder(target, "server")]
    alone = [target for target in targets if needs_own_process(target)]
    shared = [target for target in targets if target not in alone]
    plain = [target for target in shared if not in_folder(target, "server")]
    server = [target for target in shared if in_folder(target, "server")]
    return [group for group in (plain, *([target] for target in alone), server) if group]


def expand(target: str) -> list[str]:
    if not Path(target).is_dir():
        return [target]
    return sorted(str(path) for path in Path(target).rglob("test_*.py"))


def in_folder(target: str, name: str) -> bool:
    path = Path(target.partition("::")[0]).resolve()
    return path.is_relative_to(REPO_ROOT / "tests" / name)


def needs_own_process(target: str) -> bool:
    source = Path(target.partition("::")[0]).read_text()
    return in_folder(target, "kernels") or OWN_PROCESS_MARK in source


def run_group(group: list[str], options: Options, totals: Totals) -> None:
    say(group[0] if len(group) == 1 else f"{Path(group[0]).parent}: {len(group)} files")
    with tempfile.TemporaryDirectory(prefix="kvedit-test-") as scratch:
        results = Path(scratch) / "results.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", selection(options)]
        command += ["-o", "junit_family=xunit1", f"--junitxml={results}"]
        status = run_to_end([*command, *options.pytest_args, *group], environment(options))
        failures_before = len(totals.failures)
        if results.is_file():
            add_results(results, totals)
        unexplained = len(totals.failures) == failures_before
        if status not in (0, NO_TESTS_COLLECTED) and unexplained:
            totals.failures.append(f"{group[0]}: pytest ended with status {status}")


def selection(options: Options) -> str:
    left_out = [] if options.long else ["not long"]
    left_out += ["not real_server"] if options.fast else []
    return " and ".join(left_out)


def add_results(results: Path, totals: Totals) -> None:
    """Count a test as passed only if nothing went wrong in it; a skipped test has not passed."""
    bad: dict[str, str] = {}
    seen: set[str] = set()
    for case in ElementTree.parse(results).iter("testcase"):
        file = case.get("file", "unknown file")
        name = f"{file}::{case.get('name')} ({case.get('classname')})"
        seen.add(name)
        totals.seconds_of[file] += float(case.get("time", 0))
        for outcome in ("failure", "error", "skipped"):
            if case.find(outcome) is not None:
                bad[name] = outcome
    totals.passed += len(seen) - len(bad)
    totals.failures += [f"{name}: {outcome}" for name, outcome in bad.items()]


def environment(options: Options | None = None) -> dict[str, str]:
    long_run = {"KVEDIT_TEST_LONG": "1"} if options and options.long else {}
    return {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **os.environ, **long_run}


def report(totals: Totals) -> None:
    say("seconds per test file")
    for file, seconds in totals.seconds_of.most_common():
        print(f"{seconds:9.1f}  {file}")
    if totals.failures:
        say("failed")
        for failure in totals.failures:
            print(f"  {failure}")
    print(f"{totals.passed} passed, {len(totals.failures)} failed", flush=True)


def say(message: str) -> None:
    print(f"==> {message}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
