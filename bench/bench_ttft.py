"""Time to first token behind a skill: full prefill, two kinds of splice, and an exact hit.

One server, one run, the arms of one repetition directly after each other in rotating order.
Every prompt is [512 distinct tokens][skill][32 tokens]; every arm's token classes are compared
with the counts that the layout implies, and a prompt that differs from the skill in one token
must be composed up to that token only.

    full      nothing cached, splicing off
    fresh     nothing cached but the skill; the server's default seam
    cached    the 512 tokens are cached; seam 0, so one forward of 32 tokens
    exact     the 512 tokens and the skill are cached as they stand; one forward of 32 tokens

Both splices and both baselines run on the same adaptations of the host (see `kvedit doctor`).

    python bench/bench_ttft.py [--sizes 256,512,...] [--reps N] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from real_server import TextIds, fresh_salt, generate

from kvedit.client import Client
from kvedit.workbench.model_store import default_model_dir
from kvedit.workbench.server_process import ServerProcess
from kvedit.workbench.timed_request import Streamed

NUM_PREFIX_TOKENS = 512
NUM_SUFFIX_TOKENS = 32
NUM_ANSWER_TOKENS = 8
SIZES = (256, 512, 1024, 2048, 4096, 7168)
ARMS = ("full", "fresh", "cached", "exact")
OFF = {"splice": "off"}


@dataclass(frozen=True)
class Prompt:
    """The three parts of one repetition, and a second ending for the exact hit."""

    prefix: list[int]
    skill: list[int]
    suffix: list[int]
    other_suffix: list[int]


@dataclass
class Measured:
    """All repetitions of one arm at one size."""

    results: list[Streamed] = field(default_factory=list)
    answers_as_full: int = 0
    wrong_counts: list[str] = field(default_factory=list)


def main() -> int:
    options = parse_arguments()
    model = options.model_path or default_model_dir()
    texts = TextIds(model)
    correct = True
    server = ServerProcess(["--model-path", str(model)], log_path=options.log)
    with server as url:
        generate(url, texts.filler("warm-up", 700), salt=fresh_salt(), options=OFF)
        for num_skill_tokens in options.sizes:
            for row in measure_size(url, texts, num_skill_tokens, options.reps):
                correct &= not row["wrong_counts"]
                print(json.dumps(row) if options.json else as_line(row), flush=True)
    return 0 if correct else 1


def measure_size(
    url: str, texts: TextIds, num_skill_tokens: int, num_reps: int
) -> Iterator[dict[str, Any]]:
    """One row per arm for one skill length. The skill is removed afterwards."""
    skill = texts.filler(f"skill {num_skill_tokens}", num_skill_tokens)
    name = f"bench-{num_skill_tokens}"
    client = Client(url)
    client.register(name, input_ids=skill, shared=True, pin=True)
    measured = {arm: Measured() for arm in ARMS}
    for rep in range(num_reps):
        run_repetition(url, make_prompt(texts, skill, rep), measured, rep)
    check_control(url, make_prompt(texts, skill, num_reps), measured["fresh"])
    client.remove(name, shared=True, purge=True)
    yield from (row_of(arm, num_skill_tokens, measured) for arm in ARMS)


def make_prompt(texts: TextIds, skill: list[int], rep: int) -> Prompt:
    prefix = texts.filler(f"prefix {len(skill)} {rep}", NUM_PREFIX_TOKENS)
    suffix = texts.encode("Question: " + "what is kept in the cellar and what in the barn, " * 8)
    other = texts.encode("Task: " + "say what is kept in the garden and what in the mill, " * 8)
    return Prompt(prefix, skill, suffix[:NUM_SUFFIX_TOKENS], other[:NUM_SUFFIX_TOKENS])


def run_repetition(url: str, prompt: Prompt, measured: dict[str, Measured], rep: int) -> None:
    """Every arm once. The exact hit reuses what the full prefill left, so it follows it."""
    salt = fresh_salt()

    def full_then_exact() -> None:
        record("full", run_full(url, prompt, salt))
        record("exact", run_exact(url, prompt, salt))

    def record(arm: str, result: Streamed) -> None:
        measured[arm].results.append(result)
        measured[arm].wrong_counts += wrong_counts(arm, result)

    steps: list[Callable[[], None]] = [
        full_then_exact,
        lambda: record("fresh", run_fresh(url, prompt)),
        lambda: record("cached", run_cached(url, prompt)),
    ]
    for step in range(len(steps)):
        steps[(rep + step) % len(steps)]()
    full = measured["full"].results[-1]
    for arm in ("full", "fresh", "cached"):
        same = measured[arm].results[-1].output_ids == full.output_ids
        measured[arm].answers_as_full += same


def run_full(url: str, prompt: Prompt, salt: str) -> Streamed:
    ids = prompt.prefix + prompt.skill + prompt.suffix
    return generate(url, ids, salt=salt, options=OFF, max_new_tokens=NUM_ANSWER_TOKENS)


def run_exact(url: str, prompt: Prompt, salt: str) -> Streamed:
    ids = prompt.prefix + prompt.skill + prompt.other_suffix
    return generate(url, ids, salt=salt, options=OFF, max_new_tokens=NUM_ANSWER_TOKENS)


def run_fresh(url: str, prompt: Prompt) -> Streamed:
    ids = prompt.prefix + prompt.skill + prompt.suffix
    return generate(url, ids, salt=fresh_salt(), max_new_tokens=NUM_ANSWER_TOKENS)


def run_cached(url: str, prompt: Prompt) -> Streamed:
    salt = fresh_salt()
    generate(url, prompt.prefix, salt=salt, options=OFF)
    ids = prompt.prefix + prompt.skill + prompt.suffix
    return generate(url, ids, salt=salt, options={"seam": 0}, max_new_tokens=NUM_ANSWER_TOKENS)


def wrong_counts(arm: str, result: Streamed) -> list[str]:
    """Deviations of the reported token classes from what the arm's layout implies."""
    report = result.report
    num_tokens = result.meta_info["prompt_tokens"]
    num_skill = num_tokens - NUM_PREFIX_TOKENS - NUM_SUFFIX_TOKENS
    seam = report["repaired"]
    exact, composed = {
        "full": (0, 0),
        "fresh": (0, num_skill - seam),
        "cached": (NUM_PREFIX_TOKENS, num_skill),
        "exact": (NUM_PREFIX_TOKENS + num_skill, 0),
    }[arm]
    expected = {
        "exact": exact,
        "composed": composed,
        "derived": 0,
        "computed": num_tokens - exact - composed,
        "copied": composed,
    }
    return [
        f"{arm}: {key}: expected {count}, got {report[key]}"
        for key, count in expected.items()
        if report[key] != count
    ]


def check_control(url: str, prompt: Prompt, measured: Measured) -> None:
    """A prompt with another token in the middle of the skill is composed up to there only."""
    middle = len(prompt.skill) // 2
    changed = list(prompt.skill)
    changed[middle] = prompt.suffix[0]
    ids = prompt.prefix + changed + prompt.suffix
    report = generate(url, ids, salt=fresh_salt()).report
    if report["composed"] + report["repaired"] != middle:
        measured.wrong_counts.append(
            f"control: composed: expected {middle - report['repaired']}, got {report['composed']}"
        )


def row_of(arm: str, num_skill_tokens: int, measured: dict[str, Measured]) -> dict[str, Any]:
    own = measured[arm]
    median_s = {a: statistics.median(r.ttft_s for r in measured[a].results) for a in ARMS}
    report = own.results[-1].report
    return {
        "bench": "ttft",
        "arm": arm,
        "skill_tokens": num_skill_tokens,
        "prefix_tokens": NUM_PREFIX_TOKENS,
        "suffix_tokens": NUM_SUFFIX_TOKENS,
        "reps": len(own.results),
        "median_s": round(median_s[arm], 4),
        "ratio_to_full": round(median_s[arm] / median_s["full"], 4),
        "ratio_to_exact": round(median_s[arm] / median_s["exact"], 3),
        **{key: report[key] for key in ("exact", "composed", "computed", "repaired")},
        # The exact hit has an ending of its own, so its answer has no counterpart.
        "answers_as_full": own.answers_as_full if arm != "exact" else None,
        "wrong_counts": own.wrong_counts,
    }


def as_line(row: dict[str, Any]) -> str:
    wrong = f"  WRONG: {'; '.join(row['wrong_counts'])}" if row["wrong_counts"] else ""
    same = "" if row["answers_as_full"] is None else f"  answers as full {row['answers_as_full']}"
    return (
        f"skill {row['skill_tokens']:5}  {row['arm']:7} {row['median_s'] * 1e3:8.0f} ms  "
        f"{1 / row['ratio_to_full']:5.1f}x faster than full  "
        f"{row['ratio_to_exact']:6.2f}x an exact hit  computed {row['computed']:5}  "
        f"composed {row['composed']:5}  reps {row['reps']}{same}{wrong}"
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", type=_sizes, default=SIZES, help="skill lengths in tokens")
    parser.add_argument("--reps", type=int, default=5, help="repetitions per arm and size")
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    parser.add_argument("--model-path", type=Path, help="default: the model of scripts/demo")
    parser.add_argument("--log", type=Path, default=Path("out/bench/ttft-server.log"))
    return parser.parse_args()


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
