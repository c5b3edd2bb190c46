"""Lint, types and all tests, in the processes they need; started by scripts/test in .venv."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from _processes import (
    adopt_orphans,
    interrupt_on_termination,
    run_to_end,
    stop_descendants,
    wait_at_most,
)

REPO_ROOT = Path(__file__).resolve().parent.parent
OWN_PROCESS_MARK = "pytest.mark.own_process"
SMALL_HOST_MARK = "pytest.mark.small_host"
NO_TESTS_COLLECTED = 5
LANE_GRACE_SECONDS = 30.0  # a lane stops its own children first
# Server tests are shared out by server configuration (tests/server/conftest.py), so that two run
# beside each other; a few files are not worth the starts.
NUM_SHARDS = 2
MIN_SHARDED_FILES = 8
SHARD = "KVEDIT_TEST_SHARD"
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
    lane: str = ""  # file for the totals of a run that is one of several side by side
    targets: list[str] = field(default_factory=list)
    pytest_args: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Lane:
    """Targets that run beside other lanes; ``shard`` k of n, as "k/n": which server tests."""

    targets: list[str]
    shard: str = ""


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
        if not options.lane:
            run_static_checks(totals)
        run_groups(test_groups(options), options, totals)
    except KeyboardInterrupt:
        if not options.lane:
            print("\n==> interrupted; everything that was started has been stopped", flush=True)
        return 130
    if options.lane:
        Path(options.lane).write_text(json.dumps(vars(totals)))
        return 0
    report(totals)
    return 1 if totals.failures or not totals.passed else 0


def run_groups(groups: list[list[str]], options: Options, totals: Totals) -> None:
    """A server uses one core: two run beside each other, and first the other tests beside them."""
    servers = [group for group in groups if in_folder(group[0], "server")]
    others = [group for group in groups if group not in servers]
    lanes = [Lane(sum(others, []))] if others else []
    lanes += server_lanes(sum(servers, []))
    if servers and len(lanes) > 1 and not options.lane:
        run_lanes(lanes, options, totals)
        return
    for group in groups:
        run_group(group, options, totals)


def server_lanes(targets: list[str]) -> list[Lane]:
    if len(targets) < MIN_SHARDED_FILES:
        return [Lane(targets)] if targets else []
    return [Lane(targets, f"{shard}/{NUM_SHARDS}") for shard in range(NUM_SHARDS)]


def run_lanes(lanes: list[Lane], options: Options, totals: Totals) -> None:
    """Run each lane in a process of its own. The last one's output is shown as it comes, the
    others' when they have ended."""
    with tempfile.TemporaryDirectory(prefix="kvedit-lanes-") as scratch:
        files = [Path(scratch) / f"lane-{i}.json" for i in range(len(lanes))]
        logs = [file.with_suffix(".log").open("wb") for file in files[:-1]]
        running: list[subprocess.Popen[bytes]] = []
        try:
            for lane, file, output in zip(lanes, files, [*logs, None], strict=True):
                command = [sys.executable, __file__, "--lane", str(file), *flags(options)]
                child = subprocess.Popen(
                    [*command, *lane.targets],
                    env=os.environ | ({SHARD: lane.shard} if lane.shard else {}),
                    stdout=output,
                    start_new_session=True,
                )
                running.append(child)
            for child in reversed(running):
                child.wait()
        except KeyboardInterrupt:
            for child in running:
                child.terminate()
            for child in running:
                wait_at_most(child, LANE_GRACE_SECONDS)
            raise
        finally:
            stop_descendants()
            for log in logs:
                log.close()
        for log in logs:
            print(Path(log.name).read_text(errors="replace"), flush=True)
        for lane, file in zip(lanes, files, strict=True):
            add_lane(lane, file, totals)


def flags(options: Options) -> list[str]:
    modes = [f"--{mode}" for mode in ("fast", "long") if getattr(options, mode)]
    return [*modes, *options.pytest_args]


def add_lane(lane: Lane, file: Path, totals: Totals) -> None:
    if not file.is_file():
        name, num_more = lane.targets[0], len(lane.targets) - 1
        totals.failures.append(f"{name} and {num_more} more: the run did not end")
        return
    found = json.loads(file.read_text())
    totals.passed += found["passed"]
    totals.failures += found["failures"]
    totals.seconds_of.update(found["seconds_of"])


def parse(arguments: list[str]) -> Options:
    options = Options()
    for before, argument in zip(["", *arguments], arguments, strict=False):
        if before in OPTIONS_WITH_A_VALUE:  # `-k kvedit` means names, not the folder
            options.pytest_args.append(argument)
        elif before == "--lane":
            options.lane = argument
        elif argument == "--lane":
            continue
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
    """Return lists of targets, one pytest process each: plain tests, those with a small host in
    their process, kernels, then servers.

    Triton reads TRITON_INTERPRET at import, so interpreted and compiled kernels cannot share a
    process; the server tests share one, and with it the servers it starts.
    """
    targets = [part for target in options.targets or ["tests"] for part in expand(target)]
    targets = list(dict.fromkeys(targets))
    if options.fast:
        targets = [target for target in targets if not in_folder(target, "server")]
    alone = [target for target in targets if needs_own_process(target)]
    shared = [target for target in targets if target not in alone]
    hosts = [target for target in shared if SMALL_HOST_MARK in source_of(target)]
    others = [target for target in shared if target not in hosts]
    plain = [target for target in others if not in_folder(target, "server")]
    server = [target for target in others if in_folder(target, "server")]
    return [group for group in (plain, hosts, *([target] for target in alone), server) if group]


def expand(target: str) -> list[str]:
    if not Path(target).is_dir():
        return [target]
    return sorted(str(path) for path in Path(target).rglob("test_*.py"))


def in_folder(target: str, name: str) -> bool:
    path = Path(target.partition("::")[0]).resolve()
    return path.is_relative_to(REPO_ROOT / "tests" / name)


def needs_own_process(target: str) -> bool:
    return in_folder(target, "kernels") or OWN_PROCESS_MARK in source_of(target)


def source_of(target: str) -> str:
    return Path(target.partition("::")[0]).read_text()


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
