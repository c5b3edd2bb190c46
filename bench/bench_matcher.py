"""What looking for skills costs one request: a 32k prompt, 100 skills of 2k tokens.

Two arms, interleaved: ``matcher`` (the product's) and ``bytes.find`` (search the prompt's bytes
for the first 8 ids of each skill, once per skill: the simplest exact alternative, and it does not
even look for merged edges). Every timed answer is compared with the known layout of the prompt.

    python bench/bench_matcher.py [--json] [--repeats N]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kvedit.namespace import SHARED
from kvedit.skills.matcher import ANCHOR_TOKENS, Match, Matcher
from kvedit.skills.segment import Segment

NUM_PROMPT_TOKENS = 32_768
NUM_SKILLS = 100
NUM_SKILL_TOKENS = 2_000
VOCAB_SIZE = 49_152
TARGET_MS = 1.0


@dataclass(frozen=True)
class Case:
    name: str
    skills: list[array[int]]
    prompt: array[int]
    expected: list[Match]


def main() -> int:
    options = parse_arguments()
    rows = [row for case in make_cases() for row in measure(case, options.repeats)]
    for row in rows:
        print(json.dumps(row) if options.json else as_line(row))
    return 0 if all(row["correct"] for row in rows) else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    parser.add_argument("--repeats", type=int, default=50, help="timed calls per arm")
    return parser.parse_args()


def make_cases() -> list[Case]:
    rng = random.Random(0)
    skills = [random_ids(rng, NUM_SKILL_TOKENS) for _ in range(NUM_SKILLS)]
    header = random_ids(rng, 64)
    alike = [header + skill[len(header) :] for skill in skills]
    plain = random_ids(rng, NUM_PROMPT_TOKENS)
    repeated = array("q", [7]) * NUM_PROMPT_TOKENS
    edge_then_sevens = [random_ids(rng, 1) + array("q", [7]) * 1_999 for _ in range(NUM_SKILLS)]
    return [
        Case("no skill inside", skills, plain, []),
        lay_out(rng, "12 skills inside", skills, range(0, 96, 8)),
        lay_out(rng, "12 of 100 with one header", alike, range(0, 96, 8)),
        Case("one token repeated, every position an anchor", edge_then_sevens, repeated, []),
    ]


def lay_out(rng: random.Random, name: str, skills: list[array[int]], chosen: range) -> Case:
    """Random text between the chosen skills, up to the full prompt length."""
    num_gap_tokens = NUM_PROMPT_TOKENS // len(chosen) - NUM_SKILL_TOKENS
    prompt, expected = array("q"), []
    for which in chosen:
        prompt += random_ids(rng, num_gap_tokens)
        expected.append(Match(which + 1, 0, len(prompt), NUM_SKILL_TOKENS))
        prompt += skills[which]
    prompt += random_ids(rng, NUM_PROMPT_TOKENS - len(prompt))
    return Case(name, skills, prompt, expected)


def measure(case: Case, num_repeats: int) -> list[dict[str, object]]:
    arms: dict[str, Callable[[], list[Match]]] = {
        "matcher": matcher_arm(case),
        "bytes.find": bytes_arm(case),
    }
    times_ms: dict[str, list[float]] = {arm: [] for arm in arms}
    correct = dict.fromkeys(arms, True)
    for repeat in range(num_repeats + 1):
        for arm, search in arms.items():
            begin = time.perf_counter()
            found = search()
            elapsed_ms = (time.perf_counter() - begin) * 1e3
            correct[arm] &= found == case.expected
            if repeat > 0:  # the first call warms caches
                times_ms[arm].append(elapsed_ms)
    return [
        {
            "bench": "matcher",
            "case": case.name,
            "arm": arm,
            "num_prompt_tokens": len(case.prompt),
            "num_skills": len(case.skills),
            "min_ms": round(min(times_ms[arm]), 3),  # what the work costs when nothing else runs
            "median_ms": round(statistics.median(times_ms[arm]), 3),
            "p90_ms": round(sorted(times_ms[arm])[int(0.9 * num_repeats)], 3),
            "target_ms": TARGET_MS,
            "correct": correct[arm],
        }
        for arm in arms
    ]


def matcher_arm(case: Case) -> Callable[[], list[Match]]:
    matcher = Matcher()
    for i, skill in enumerate(case.skills):
        matcher.add(segment(i + 1, skill), [spell(skill[:e]) for e in range(9)])
    prompt = case.prompt
    return lambda: matcher.find(prompt, SHARED, lambda a, b: spell(prompt[a:b]))


def bytes_arm(case: Case) -> Callable[[], list[Match]]:
    def search() -> list[Match]:
        prompt = case.prompt.tobytes()
        starts: list[tuple[int, int, int]] = []  # (start, -num_tokens, number)
        for i, skill in enumerate(case.skills):
            anchor, at = skill[:ANCHOR_TOKENS].tobytes(), -1
            while (at := prompt.find(anchor, at + 1)) >= 0:
                if at % skill.itemsize == 0:
                    start = at // skill.itemsize
                    starts.append((start, -num_common(case.prompt, start, skill), i + 1))
        return leftmost_longest(sorted(starts))

    return search


def leftmost_longest(starts: list[tuple[int, int, int]]) -> list[Match]:
    matches: list[Match] = []
    free_from = 0
    for start, negative, number in starts:
        if start >= free_from:
            matches.append(Match(number, 0, start, -negative))
            free_from = start - negative
    return matches


def num_common(prompt: array[int], start: int, skill: array[int]) -> int:
    if prompt[start : start + len(skill)] == skill:
        return len(skill)
    pairs = zip(prompt[start:], skill, strict=False)
    return next(i for i, (a, b) in enumerate(pairs) if a != b)


def segment(number: int, token_ids: array[int]) -> Segment:
    return Segment(
        number=number,
        name=f"skill{number}",
        namespace=SHARED,
        token_ids=token_ids,
        compile_prefix=array("q"),
        version=1,
        seam=None,
        identity="",
    )


def spell(token_ids: array[int]) -> str:
    return "".join(f" {t}" for t in token_ids)


def random_ids(rng: random.Random, num_tokens: int) -> array[int]:
    return array("q", (rng.randrange(VOCAB_SIZE) for _ in range(num_tokens)))


def as_line(row: dict[str, object]) -> str:
    verdict = "correct" if row["correct"] else "WRONG"
    return (
        f"{row['case']:<46}{row['arm']:<12}min {row['min_ms']:>8} ms   "
        f"median {row['median_ms']:>8} ms   "
        f"p90 {row['p90_ms']:>8} ms   {verdict}"
    )


if __name__ == "__main__":
    sys.exit(main())
