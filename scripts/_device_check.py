"""Steps of scripts/device_check; --dry-run: small shapes, the CPU, Triton interpreted."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from kvedit_kernels import PoolGroup, copy_slots_ref, relocate_ref
from kvedit_kernels.flashinfer_check import (
    PREFILL_TOLERANCE,
    check_paged_prefill,
    check_rotation,
    missing_calls,
)
from kvedit_kernels.relocate_triton import copy_slots_triton, relocate_triton
from kvedit_kernels.testing import Case, build, draw_plan, snapshot

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _device_copies import copy_checks
from _device_server import server_checks

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MLA = {"num_heads": 1, "head_dim": 576, "v_head_dim": 0, "rot_offset": 512, "is_neox": False}
SHAPES = (
    *(Case(dtype=dtype, num_tokens=300) for dtype in (BF16, FP16, FP32, E4M3, E5M2)),
    Case(num_heads=8, head_dim=128, v_head_dim=128, rot_dim=128, num_tokens=300),
    Case(num_heads=3, head_dim=96, v_head_dim=96, rot_dim=96, placement="scattered"),
    Case(num_heads=5, head_dim=80, v_head_dim=80, rot_dim=20, rot_offset=4, is_neox=False),
    Case(is_hnd=True, page_size=64, v_head_dim=128, num_tokens=200),
    Case(placement="in_place", page_size=1),
    Case(**MLA, num_tokens=100),
    Case(head_dim=256, v_head_dim=256, rot_dim=256, num_heads=1, rotate=False),
)
TARGET_SHARE_OF_COPY = 0.8


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Sizes of the timed steps: an 8B-class pool and model, or a toy of the same form."""

    device: str
    num_layers: int
    num_heads: int
    head_dim: int
    num_query_heads: int
    mlp_dim: int
    copy_tokens: tuple[int, ...]
    sweep_tokens: int
    prefill_tokens: tuple[int, ...]
    num_rounds: int


FULL = Scale(
    device="cuda",
    num_layers=32,
    num_heads=8,
    head_dim=128,
    num_query_heads=32,
    mlp_dim=14336,
    copy_tokens=(2048, 8192, 32768),
    sweep_tokens=8192,
    prefill_tokens=(2048, 8192, 32768),
    num_rounds=20,
)
DRY = Scale(
    device="cpu",
    num_layers=2,
    num_heads=2,
    head_dim=32,
    num_query_heads=4,
    mlp_dim=64,
    copy_tokens=(32, 64),
    sweep_tokens=32,
    prefill_tokens=(32,),
    num_rounds=1,
)
Rows = list[dict[str, object]]


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    scale = DRY if options.dry_run else FULL
    if scale.device == "cuda" and not torch.cuda.is_available():
        print("kvedit: device_check: expected a CUDA device, got none (--dry-run needs none)")
        return 2
    start = time.perf_counter()
    steps: dict[str, Callable[[Scale], Rows]] = {
        "bit_compare": bit_compare,
        "flashinfer": flashinfer_checks,
        "copies": lambda scale: copy_checks(on_gpu=scale.device == "cuda"),
        "bandwidth": bandwidth,
        "sweep": sweep,
        "prefill_against_splice": prefill_against_splice,
        "server": server,
    }
    if options.no_server:
        del steps["server"]
    report: dict[str, object] = {"machine": machine_name(scale), "dry_run": options.dry_run}
    for name, step in steps.items():
        report[name] = rows = step(scale)
        print(f"\n== {name} ({time.perf_counter() - start:.0f} s)\n{table(rows)}", flush=True)
        torch.cuda.empty_cache()
    failures = [row for rows in report.values() if isinstance(rows, list) for row in rows]
    failures = [row for row in failures if row.get("passed") is False]
    report["failures"] = failures
    write(report, options.out)
    print(f"\n{len(failures)} failed; written to {options.out}.json and .md")
    return 1 if failures else 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Relocation kernels on this machine's GPU.")
    parser.add_argument("--dry-run", action="store_true", help="the logic on the CPU, no numbers")
    parser.add_argument("--no-server", action="store_true", help="leave the real server out")
    parser.add_argument("--out", type=Path, default=Path("out/device_check"))
    return parser.parse_args(arguments)


def machine_name(scale: Scale) -> str:
    if scale.device == "cpu":
        return "dry run"
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"


def bit_compare(scale: Scale) -> Rows:
    """Triton on the device against the reference on the CPU, every bit of every layer."""
    rows = []
    for case in SHAPES:
        want_group, want_plan = build(case)
        group, plan = build(case, device=scale.device)
        relocate_ref(group=want_group, plan=want_plan)
        relocate_triton(group=group, plan=plan)
        same = same_bits(snapshot(want_group), snapshot(group))
        want_group, want_plan = build(case)
        group, plan = build(case, device=scale.device)
        copy_slots_ref(group=want_group, src=want_plan.src, dst=want_plan.dst)
        copy_slots_triton(group=group, src=plan.src, dst=plan.dst)
        same_copy = same_bits(snapshot(want_group), snapshot(group))
        rows.append({"case": str(case), "relocate": same, "copy": same_copy})
        rows[-1]["passed"] = same and same_copy
    return rows


def same_bits(one, other) -> bool:
    pairs = zip(one[0] + one[1], other[0] + other[1], strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def flashinfer_checks(scale: Scale) -> Rows:
    if importlib.util.find_spec("flashinfer") is None:
        return [{"check": "flashinfer", "result": "not installed: not compared"}]
    import flashinfer

    missing = missing_calls(flashinfer)
    rows: Rows = [{"check": "calls", "result": missing or "all there", "passed": not missing}]
    if scale.device == "cpu" or missing:
        return rows
    for is_neox in (True, False):
        wide = {"num_heads": 8, "head_dim": 128, "v_head_dim": 128, "rot_dim": 128}
        case = Case(**wide, is_neox=is_neox, num_tokens=500, num_layers=1)
        worst = check_rotation(case)
        rows.append({"check": f"rotation {case}", "result": worst, "passed": worst <= 1})
    error = check_paged_prefill(case)
    passed = error <= PREFILL_TOLERANCE
    rows.append({"check": f"paged prefill {case}", "result": error, "passed": passed})
    return rows


def server(scale: Scale) -> Rows:
    """Where SGLang is installed: a real server, splice against exact reuse."""
    if importlib.util.find_spec("sglang") is None:
        return [{"check": "server", "result": "SGLang is not installed: not compared"}]
    log_path = Path("out/device_check-server.log")
    return server_checks(on_gpu=scale.device == "cuda", log_path=log_path)


def bandwidth(scale: Scale) -> Rows:
    """GB/s read and written, beside a plain device copy of the same bytes."""
    rows: Rows = []
    group = pool(scale, max(scale.copy_tokens))
    for num_tokens in scale.copy_tokens:
        for placement in ("pages", "scattered"):
            plan = draw_plan(pool_case(scale, num_tokens, placement), device=scale.device)
            num_bytes = num_tokens * group.bytes_per_token
            source = torch.empty(num_bytes, dtype=torch.uint8, device=scale.device)
            target = torch.empty_like(source)
            copied = seconds(lambda s=source, t=target: t.copy_(s), scale)
            moved = seconds(lambda p=plan: relocate_triton(group=group, plan=p), scale)
            share = copied / moved
            rows.append(
                {
                    "num_tokens": num_tokens,
                    "placement": placement,
                    "relocate_ms": round(moved * 1e3, 4),
                    "copy_ms": round(copied * 1e3, 4),
                    "relocate_gb_per_s": round(2 * num_bytes / moved / 1e9, 1),
                    "share_of_copy": round(share, 3),
                }
            )
            if scale.device == "cuda":
                rows[-1]["passed"] = share >= TARGET_SHARE_OF_COPY
    return rows


def sweep(scale: Scale) -> Rows:
    """Block and warp choices; the production choice is the row marked so."""
    group = pool(scale, scale.sweep_tokens)
    plan = draw_plan(pool_case(scale, scale.sweep_tokens, "pages"), device=scale.device)
    num_bytes = scale.sweep_tokens * group.bytes_per_token
    rows: Rows = []
    for block_tokens in (None, 2, 4, 8):
        for num_warps in (2, 4, 8):
            taken = seconds(
                lambda b=block_tokens, w=num_warps: relocate_triton(
                    group=group, plan=plan, block_tokens=b, num_warps=w
                ),
                scale,
            )
            rows.append(
                {
                    "block_tokens": block_tokens or "production",
                    "num_warps": num_warps,
                    "gb_per_s": round(2 * num_bytes / taken / 1e9, 1),
                }
            )
    return sorted(rows, key=lambda row: -row["gb_per_s"])


def prefill_against_splice(scale: Scale) -> Rows:
    """Full prefill of a randomly initialised model of this shape, against moving its KV."""
    layer = random_layer(scale)
    group = pool(scale, max(scale.prefill_tokens))
    rows: Rows = []
    for num_tokens in scale.prefill_tokens:
        hidden_dim = scale.num_query_heads * scale.head_dim
        hidden = torch.randn(num_tokens, hidden_dim, device=scale.device).to(BF16)

        def prefill(hidden=hidden) -> None:
            # One layer's weights serve all layers: far larger than any cache, so read each time.
            for _ in range(scale.num_layers):
                hidden = layer(hidden)

        plan = draw_plan(pool_case(scale, num_tokens, "pages"), device=scale.device)
        computed = seconds(prefill, scale, num_rounds=min(3, scale.num_rounds))
        moved = seconds(lambda p=plan: relocate_triton(group=group, plan=p), scale)
        rows.append(
            {
                "num_tokens": num_tokens,
                "prefill_ms": round(computed * 1e3, 2),
                "splice_ms": round(moved * 1e3, 3),
                "prefill_over_splice": round(computed / moved, 1),
            }
        )
    return rows


def random_layer(scale: Scale) -> Callable[[torch.Tensor], torch.Tensor]:
    """hidden [T, dim] -> hidden: norms, grouped-query attention without rope, gated MLP."""
    dim, kv_dim = scale.num_query_heads * scale.head_dim, scale.num_heads * scale.head_dim

    def weight(rows: int, columns: int) -> torch.Tensor:
        values = torch.randn(rows, columns, device=scale.device, dtype=BF16)
        return values / rows**0.5

    qkv, out = weight(dim, dim + 2 * kv_dim), weight(dim, dim)
    gate_up, down = weight(dim, 2 * scale.mlp_dim), weight(scale.mlp_dim, dim)

    def heads(x: torch.Tensor) -> torch.Tensor:
        return x.view(1, len(x), -1, scale.head_dim).transpose(1, 2)

    def run(hidden: torch.Tensor) -> torch.Tensor:
        normed = torch.nn.functional.rms_norm(hidden, (dim,))
        query, key, value = (normed @ qkv).split((dim, kv_dim, kv_dim), dim=1)
        mixed = torch.nn.functional.scaled_dot_product_attention(
            heads(query), heads(key), heads(value), is_causal=True, enable_gqa=True
        )
        hidden = hidden + mixed.transpose(1, 2).reshape(len(hidden), dim) @ out
        gate, up = (torch.nn.functional.rms_norm(hidden, (dim,)) @ gate_up).chunk(2, dim=1)
        return hidden + (torch.nn.functional.silu(gate) * up) @ down

    return run


def pool(scale: Scale, max_tokens: int) -> PoolGroup:
    """A pool drawn on the device, with room for the largest source and target."""
    num_slots = pool_case(scale, max_tokens, "pages").num_slots
    shape = (num_slots, scale.num_heads, scale.head_dim)
    k, v = (
        [torch.randn(shape, device=scale.device, dtype=BF16) for _ in range(scale.num_layers)]
        for _ in "kv"
    )
    return PoolGroup.from_views(k, v, rot_dim=scale.head_dim, is_neox=True)


def pool_case(scale: Scale, num_tokens: int, placement: str) -> Case:
    return Case(
        num_heads=scale.num_heads,
        head_dim=scale.head_dim,
        v_head_dim=scale.head_dim,
        rot_dim=scale.head_dim,
        num_layers=scale.num_layers,
        num_tokens=num_tokens,
        placement=placement,
        deltas=(1000, 4000),
    )


def seconds(work: Callable[[], object], scale: Scale, *, num_rounds: int | None = None) -> float:
    """Median seconds of one call, after one that is not counted (compilation)."""
    num_rounds = num_rounds or scale.num_rounds
    times = []
    for _ in range(num_rounds + 1):
        times.append(event_seconds(work) if scale.device == "cuda" else clock_seconds(work))
    return sorted(times[1:])[num_rounds // 2]


def event_seconds(work: Callable[[], object]) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3


def clock_seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def table(rows: Rows) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(str(row.get(name, "")) for name in columns) + " |" for row in rows]
    return "\n".join(lines)


def write(report: dict[str, object], out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(report, indent=1))
    parts = [f"# Device check: {report['machine']}"]
    parts += [f"## {name}\n\n{table(rows)}" for name, rows in report.items() if _is_table(rows)]
    out.with_suffix(".md").write_text("\n\n".join(parts) + "\n")


def _is_table(rows: object) -> bool:
    return isinstance(rows, list) and bool(rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
