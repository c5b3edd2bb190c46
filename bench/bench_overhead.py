"""What kvedit costs requests that use no skill: kvedit installed against `--stock`.

Two servers with the same flags and the same host adaptations, both up, one of them idle at any
time. A round runs kvedit, stock and stock once more in rotating order on prompts that neither
has seen; the second stock run is the control: its ratio to the first is what noise alone makes.

    ttft        one request of 1,024 tokens, time to the first token
    throughput  8 requests of 256 tokens at once, 32 new tokens each, output tokens per second

The answers of a prompt must be the same on both servers. Which server starts first matters by
itself (where its memory lies): measure both orders, with and without --stock-first.

    python bench/bench_overhead.py [--rounds N] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from real_server import TextIds, fresh_salt, generate

from kvedit.workbench.model_store import default_model_dir
from kvedit.workbench.server_process import ServerProcess

ARMS = ("kvedit", "stock", "stock again")
NUM_TTFT_TOKENS = 1024
NUM_PARALLEL = 8
NUM_PARALLEL_TOKENS = 256
NUM_NEW_TOKENS = 32
POOL_FLAGS = ("--max-total-tokens", "16384")


@dataclass
class Arm:
    """Everything measured for one arm; answers by prompt name."""

    ttft_s: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    answers: dict[str, list[int]] = field(default_factory=dict)


def main() -> int:
    options = parse_arguments()
    model = options.model_path or default_model_dir()
    texts = TextIds(model)
    flags = ["--model-path", str(model), *POOL_FLAGS]
    arms = {name: Arm() for name in ARMS}
    starts = {"kvedit": flags, "stock": ["--stock", *flags]}
    order = reversed(starts) if options.stock_first else iter(starts)
    with ExitStack() as servers:
        up = {
            name: servers.enter_context(
                ServerProcess(starts[name], log_path=options.log_dir / f"overhead-{name}.log")
            )
            for name in list(order)
        }
        ours, stock = up["kvedit"], up["stock"]
        urls = dict(zip(ARMS, (ours, stock, stock), strict=True))
        for url in (ours, stock):
            run_round(url, texts, "warm-up", Arm())
        for number in range(options.rounds):
            for step in range(len(ARMS)):
                name = ARMS[(number + step) % len(ARMS)]
                run_round(urls[name], texts, f"round {number}", arms[name])
    rows = rows_of(arms)
    for row in rows:
        print(json.dumps(row) if options.json else as_line(row))
    return 0 if all(row["answers_differ"] == 0 for row in rows) else 1


def run_round(url: str, texts: TextIds, name: str, arm: Arm) -> None:
    """One latency request, then one burst; a fresh salt each, so nothing is cached."""
    single = generate(url, texts.filler(name, NUM_TTFT_TOKENS), salt=fresh_salt(), max_new_tokens=4)
    arm.ttft_s.append(single.ttft_s)
    arm.answers[name] = single.output_ids
    prompts = [texts.filler(f"{name} {i}", NUM_PARALLEL_TOKENS) for i in range(NUM_PARALLEL)]

    def one(ids: list[int]) -> int:
        result = generate(url, ids, salt=fresh_salt(), max_new_tokens=NUM_NEW_TOKENS)
        return int(result.meta_info["completion_tokens"])

    started = time.perf_counter()
    with ThreadPoolExecutor(NUM_PARALLEL) as pool:
        num_tokens = sum(pool.map(one, prompts))
    arm.tokens_per_s.append(num_tokens / (time.perf_counter() - started))


def rows_of(arms: Mapping[str, Arm]) -> list[dict[str, Any]]:
    """One row per measure and arm; `cost` is positive when the arm is worse than stock."""
    stock = arms["stock"]
    rows = []
    for name, arm in arms.items():
        differ = sum(arm.answers[prompt] != stock.answers[prompt] for prompt in stock.answers)
        for measure, own, base, sign in (
            ("ttft_s", arm.ttft_s, stock.ttft_s, 1),
            ("tokens_per_s", arm.tokens_per_s, stock.tokens_per_s, -1),
        ):
            # Paired: neighbours in time share the load of the machine, medians far apart do not.
            ratios = [a / b for a, b in zip(own, base, strict=True)]
            rows.append(
                {
                    "bench": "overhead",
                    "measure": measure,
                    "arm": name,
                    "rounds": len(own),
                    "median": round(statistics.median(own), 5),
                    "best": round(min(own) if sign > 0 else max(own), 5),
                    "ratio_to_stock": round(statistics.median(ratios), 4),
                    "cost_percent": round(sign * (statistics.median(ratios) - 1) * 100, 2) + 0.0,
                    "answers_differ": differ,
                }
            )
    return rows


def as_line(row: dict[str, Any]) -> str:
    return (
        f"{row['measure']:12}  {row['arm']:11}  median {row['median']:9.4f}  "
        f"best {row['best']:9.4f}  cost against stock {row['cost_percent']:+6.2f} %  "
        f"rounds {row['rounds']}  answers that differ {row['answers_differ']}"
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="rounds of all three arms")
    parser.add_argument("--stock-first", action="store_true", help="start the stock server first")
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    parser.add_argument("--model-path", type=Path, help="default: the model of scripts/demo")
    parser.add_argument("--log-dir", type=Path, default=Path("out/bench"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
