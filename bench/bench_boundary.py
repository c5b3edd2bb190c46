"""What a forced chunk boundary costs, in tokens of prefill: the default of KVEDIT_BOUNDARY_TOKENS.

Eight skills stand in one fresh prompt, and three arms serve it on one server, interleaved:

    cut       32 tokens of text in front of each skill: eight forced boundaries
    together  the same tokens, the skills side by side: one forced boundary
    plain     the same tokens as in "together", splicing off: one pass over everything

cut - together is seven boundaries; plain - together is the skills' prefill less one boundary.
The price is what one boundary costs over what one token of the skills costs. A run of fewer tokens
is cheaper to compute than to splice.

    python bench/bench_boundary.py [--sizes 64,128,256] [--reps N] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from real_server import TextIds, fresh_salt, generate

from kvedit.client import Client
from kvedit.workbench.model_store import default_model_dir
from kvedit.workbench.server_process import ServerProcess

NUM_SKILLS = 8
NUM_GAP_TOKENS = 32
SIZES = (64, 128, 256)
ARMS = ("cut", "together", "plain")


def main() -> int:
    options = parse_arguments()
    model = options.model_path or default_model_dir()
    texts = TextIds(model)
    prices = []
    # no price: every run is spliced, whatever it costs
    server = ServerProcess(
        ["--model-path", str(model)], env={"KVEDIT_BOUNDARY_TOKENS": "0"}, log_path=options.log
    )
    with server as url:
        for num_tokens in options.sizes:
            row = measure(url, texts, num_tokens, options.reps)
            prices.append(row["price_tokens"])
            print(json.dumps(row) if options.json else as_line(row), flush=True)
    print(f"price of a boundary: {min(prices):.0f} to {max(prices):.0f} tokens", flush=True)
    return 0


def measure(url: str, texts: TextIds, num_tokens: int, num_reps: int) -> dict[str, Any]:
    """Seconds per arm (medians) and the price, for skills of ``num_tokens`` tokens."""
    skills = [texts.filler(f"skill {num_tokens} {i}", num_tokens) for i in range(NUM_SKILLS)]
    client = Client(url)
    names = [f"bench-{num_tokens}-{i}" for i in range(NUM_SKILLS)]
    for name, ids in zip(names, skills, strict=True):
        client.register(name, input_ids=ids, shared=True, pin=True)
    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for rep in range(-1, num_reps):  # the first is a warm-up
        for step in range(len(ARMS)):
            arm = ARMS[(rep + step) % len(ARMS)]
            taken = run(url, texts, skills, arm, f"{num_tokens} {rep} {arm}")
            if rep >= 0:
                seconds[arm].append(taken)
    for name in names:
        client.remove(name, shared=True, purge=True)
    medians = {arm: statistics.median(values) for arm, values in seconds.items()}
    boundary_s = (medians["cut"] - medians["together"]) / (NUM_SKILLS - 1)
    token_s = (medians["plain"] - medians["together"] + boundary_s) / (NUM_SKILLS * num_tokens)
    return {
        "skill_tokens": num_tokens,
        **{f"{arm}_s": round(value, 3) for arm, value in medians.items()},
        "boundary_s": round(boundary_s, 4),
        "token_s": round(token_s, 6),
        "price_tokens": round(boundary_s / token_s, 1),
    }


def run(url: str, texts: TextIds, skills: list[list[int]], arm: str, seed: str) -> float:
    """TTFT in seconds. Raises RuntimeError when the arm is not what it is meant to be."""
    gaps = [texts.filler(f"gap {seed} {i}", NUM_GAP_TOKENS) for i in range(NUM_SKILLS)]
    tail = texts.filler(f"tail {seed}", NUM_GAP_TOKENS)
    if arm == "cut":
        parts = [part for gap, skill in zip(gaps, skills, strict=True) for part in (gap, skill)]
    else:
        parts = [*gaps, *skills]
    ids = [token for part in (*parts, tail) for token in part]
    options = {"splice": "off"} if arm == "plain" else {"seam": 0}
    answer = generate(url, ids, salt=fresh_salt(), options={**options, "report": True})
    composed = 0 if arm == "plain" else NUM_SKILLS * len(skills[0])
    if answer.report["composed"] != composed:
        raise RuntimeError(f"{arm}: expected {composed} composed tokens, got {answer.report}")
    return answer.ttft_s


def as_line(row: dict[str, Any]) -> str:
    return (
        f"skills of {row['skill_tokens']:>4}: cut {row['cut_s']:.2f} s, together "
        f"{row['together_s']:.2f} s, plain {row['plain_s']:.2f} s; a boundary costs "
        f"{1e3 * row['boundary_s']:.0f} ms, a token {1e3 * row['token_s']:.2f} ms: "
        f"price {row['price_tokens']:.0f} tokens"
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-path", type=Path, help="default: the demo's model")
    parser.add_argument(
        "--sizes", type=lambda text: [int(part) for part in text.split(",")], default=list(SIZES)
    )
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument("--log", type=Path, help="write the server's output here")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
