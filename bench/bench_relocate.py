"""Relocation on the CPU against memcpy of the same bytes, paired round by round in one run.

Each round times memcpy and then the implementation over the same source and target slots of the
same pool; `ratio_to_memcpy` is the median of the rounds' ratios. The result of every row is
compared with the contract's bound before the row is printed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from kvedit_kernels import PoolGroup, RelocationPlan, cpu_kernel_status, delta_rows, relocate_ref
from kvedit_kernels.relocate_cpu import relocate_cpu
from kvedit_kernels.testing import Case, expect_rotated

DELTA_POS = 700
FIRST_SLOT = 16  # page 0 is the host's sink
POOLS = {
    # name: (layers, KV heads, head_dim) of bf16 keys and values
    "smollm2-135m": (30, 3, 64),
    "8b": (32, 8, 128),
}
IMPLEMENTATIONS = {"cpu": relocate_cpu, "ref": relocate_ref}
Move = Callable[[], object]
# Through CDLL, so that the interpreter lock is free while it copies (ctypes.memmove keeps it).
_memcpy = ctypes.CDLL(None).memcpy
_memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memcpy.restype = ctypes.c_void_p


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    if not options.json:
        print(f"{cpu_kernel_status()}; {platform.processor() or platform.machine()}")
    for pool in options.pools:
        group = build_pool(pool, max(options.tokens))
        for num_threads in options.threads:
            torch.set_num_threads(num_threads)
            for num_tokens in options.tokens:
                for row in measure(pool, group, num_tokens, num_threads, options):
                    print_row(row, options.json)
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument("--pools", nargs="+", choices=POOLS, default=list(POOLS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[512, 2048, 8192])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--ref-rounds", type=int, default=1, help="the reference is slow")
    parser.add_argument("--slots", choices=["run", "scattered"], default="run")
    return parser.parse_args(arguments)


def build_pool(pool: str, max_tokens: int) -> PoolGroup:
    """A pool with room for the largest source and target; every page is touched here."""
    num_layers, num_heads, head_dim = POOLS[pool]
    shape = (FIRST_SLOT + 2 * max_tokens, num_heads, head_dim)
    k, v = ([torch.randn(shape).to(torch.bfloat16) for _ in range(num_layers)] for _ in "kv")
    return PoolGroup.from_views(k, v, rot_dim=head_dim, is_neox=True)


def measure(
    pool: str, group: PoolGroup, num_tokens: int, num_threads: int, options: argparse.Namespace
) -> list[dict[str, object]]:
    case = Case(
        num_heads=group.num_heads,
        head_dim=group.head_dim,
        rot_dim=group.rot_dim,
        num_tokens=num_tokens,
        deltas=(DELTA_POS,),
    )
    plan = build_plan(case, options.slots)
    rows = []
    for name, implementation in IMPLEMENTATIONS.items():
        num_rounds = options.ref_rounds if name == "ref" else options.rounds
        with ThreadPoolExecutor(num_threads) as threads:
            copy = memcpy_of(group, num_tokens, threads, num_threads)
            times = paired(copy, partial(implementation, group=group, plan=plan), num_rounds)
        check(case, group, plan)
        moved = statistics.median(after for _, after in times)
        rows.append(
            {
                "bench": "relocate",
                "pool": pool,
                "impl": name,
                "num_tokens": num_tokens,
                "num_threads": num_threads,
                "slots": options.slots,
                "milliseconds": round(moved * 1e3, 3),
                "memcpy_milliseconds": round(statistics.median(c for c, _ in times) * 1e3, 3),
                "ratio_to_memcpy": round(statistics.median(m / c for c, m in times), 3),
                "gb_per_s": round(2 * num_tokens * group.bytes_per_token / moved / 1e9, 2),
                "num_rounds": num_rounds,
                "correct": True,
                "kernel": cpu_kernel_status() if name == "cpu" else "torch",
            }
        )
    return rows


def build_plan(case: Case, slots: str) -> RelocationPlan:
    src = torch.arange(FIRST_SLOT, FIRST_SLOT + case.num_tokens)
    if slots == "scattered":
        src = src[torch.randperm(case.num_tokens)]
    return RelocationPlan(
        src=src,
        dst=torch.arange(case.num_tokens) + FIRST_SLOT + case.num_tokens,
        row=torch.zeros(case.num_tokens, dtype=torch.int32),
        cos_sin=delta_rows(case.deltas, case.inv_freq),
    )


def memcpy_of(
    group: PoolGroup, num_tokens: int, threads: ThreadPoolExecutor, num_threads: int
) -> Move:
    """libc's memcpy of the same source rows to the same target rows, views split over threads."""
    copies = []
    for view in (*group.k_views, *group.v_views):
        row_bytes = view.stride(0) * view.element_size()
        src = view.data_ptr() + FIRST_SLOT * row_bytes
        copies.append((src + num_tokens * row_bytes, src, num_tokens * row_bytes))

    def copy_share(first: int) -> None:
        for target, source, num_bytes in copies[first::num_threads]:
            _memcpy(target, source, num_bytes)

    if num_threads == 1:
        return lambda: copy_share(0)
    return lambda: list(threads.map(copy_share, range(num_threads)))


def paired(one: Move, other: Move, num_rounds: int) -> list[tuple[float, float]]:
    """Seconds of (one, other) per round, after a round that is not counted."""
    times = [(timed(one), timed(other)) for _ in range(num_rounds + 1)]
    return times[1:]


def timed(move: Move) -> float:
    start = time.perf_counter()
    move()
    return time.perf_counter() - start


def check(case: Case, group: PoolGroup, plan: RelocationPlan) -> None:
    """The last round's result, every layer: V equal, K within the bound of correct rounding."""
    for layer, (k, v) in enumerate(zip(group.k_views, group.v_views, strict=True)):
        if not torch.equal(v[plan.dst], v[plan.src]):
            raise AssertionError(f"kvedit: bench_relocate: V of layer {layer} differs")
        given, got = k[plan.src].double(), k[plan.dst].double()
        expect_rotated(f"K of layer {layer}", case, given, got, plan.row.long())


def print_row(row: dict[str, object], as_json: bool) -> None:
    if as_json:
        print(json.dumps(row), flush=True)
        return
    pool, name, num_tokens = row["pool"], row["impl"], row["num_tokens"]
    print(
        f"{pool:14} {name:4} {num_tokens:6} tokens {row['num_threads']} threads"
        f" {row['milliseconds']:9.2f} ms {row['gb_per_s']:6.2f} GB/s"
        f" {row['ratio_to_memcpy']:6.2f} x memcpy",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
