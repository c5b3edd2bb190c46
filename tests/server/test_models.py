"""Model families, pools and KV dtypes end to end: tiny random models on the real server.

Pool level tests (tests/unit/test_pools_*.py) cover what no CPU server can show.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from kvedit.rope import RopeSpec, rope_specs
from kvedit.workbench.server_process import ServerFailed, ServerProcess
from kvedit_kernels.contract import arithmetic_bound
from tests.server.harness import Server, ServerConfig, ServerPool, fresh_name, random_ids
from tests.server.test_bit_equal import assert_same
from tests.server.tiny_models import CONTEXT, NUM_LAYERS, tiny_model

RUN_LAST = True  # servers of its own
pytestmark = pytest.mark.real_server

NUM_TOKENS = 304  # whole pages of every page size used here
NUM_EXACT_LAYERS = 2  # their keys do not depend on context, see tiny_models
# Relative error of a layer's keys against keys computed at the target: the host's 16-bit cos and
# sin table, and one rounding more than the host's own (measured .005).
K_BOUND = 0.01


@dataclass(frozen=True)
class Case:
    """One server: a model family with the host's flags and page size."""

    family: str
    flags: tuple[str, ...] = ()
    page_size: int = 1


def long(*args: Any, name: str) -> Any:
    return pytest.param(Case(*args), id=name, marks=pytest.mark.long)


CASES = [
    pytest.param(Case("gemma3"), id="gemma3"),
    pytest.param(Case("llama3"), id="llama3"),
    pytest.param(Case("deepseek_v2", page_size=16), id="mla-yarn-p16"),
    pytest.param(Case("qwen3_moe"), id="qwen3-moe"),
    long("mellum", name="window-pool"),
    long("qwen3", (), 16, name="qwen3-p16"),
    long("mixtral", name="mixtral"),
]


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    """Of module scope, so that all tests of one server run together."""
    chosen: Case = request.param
    return chosen


@pytest.fixture(scope="module")
def model_dir(
    case: Case, default_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return tiny_model(case.family, default_model_dir, tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def server(servers: ServerPool, case: Case, model_dir: Path) -> Server:
    return servers.get(
        ServerConfig(model=str(model_dir), flags=case.flags, page_size=case.page_size)
    )


@pytest.fixture(scope="module")
def specs(model_dir: Path) -> list[RopeSpec]:
    config = json.loads((model_dir / "config.json").read_text("utf-8"))
    found = [s for s in rope_specs(config, num_layers=NUM_LAYERS, context_len=CONTEXT) if s]
    assert len(found) == NUM_LAYERS
    return found


def test_splice_at_its_own_position_equals_exact_reuse(server: Server, case: Case) -> None:
    """Bit for bit: the spliced keys and values are those of an ordinary prefill."""
    skill = random_ids(("m-s", case), NUM_TOKENS)
    prompt = skill + random_ids(("m-t", case), 9)
    server.add_skill(fresh_name(), skill)
    spliced = server.generate(prompt, num_new=8, top=20, kvedit={"seam": 0})
    key = fresh_name()
    server.generate(skill, kvedit={"splice": "off"}, extra_key=key)
    exact = server.generate(prompt, num_new=8, top=20, kvedit={"splice": "off"}, extra_key=key)
    assert spliced.split == (0, NUM_TOKENS, 0, 9)
    assert exact.split == (NUM_TOKENS, 0, 0, 9)
    assert_same(spliced, exact)


def test_relocated_keys(server: Server, case: Case, specs: list[RopeSpec], tmp_path: Path) -> None:
    skill = random_ids(("m-k", case), NUM_TOKENS)
    server.add_skill(fresh_name(), skill)
    server.generate(skill + [5, 6], kvedit={"seam": 0})
    still = dump(server, skill + [5, 6], tmp_path / "still.pt")
    assert still["pieces"] == [(0, NUM_TOKENS, 0)]
    for shift in (1, 100, 3000):
        prompt = random_ids(("m-h", case, shift), shift) + skill + [5, 6]
        answer = server.generate(prompt, kvedit={"seam": 0})
        [span] = answer.report["spans"]
        start, stop = span["start"], span["stop"]
        assert span["delta"] == shift and stop - start > NUM_TOKENS - 2 * case.page_size
        moved = dump(server, prompt, tmp_path / "moved.pt")
        assert moved["pieces"] == [(start, stop, shift)]
        key = fresh_name()
        server.generate(prompt, kvedit={"splice": "off"}, extra_key=key)
        exact = dump(server, prompt, tmp_path / "exact.pt", splice="off", extra_key=key)
        assert exact["pieces"] == []
        for layer, spec in enumerate(specs):
            given = still["k"][layer][start - shift : stop - shift]
            got = moved["k"][layer][start:stop]
            expect_rotated(f"layer {layer} at shift {shift}", spec, given, got, shift)
            if layer < NUM_EXACT_LAYERS:
                want = exact["k"][layer][start:stop]
                expect_exact(f"layer {layer} at shift {shift}", spec, given, got, want, shift)
            values = moved["v"][layer][start:stop]
            assert same_bytes(values, still["v"][layer][start - shift : stop - shift])
    assert server.audit() == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (
            ("--quantization", "fp8"),
            "Fp8LinearMethod on CPU requires that CPU has AMX support",
        ),
        (
            ("--kv-cache-dtype", "fp8_e4m3"),
            "CPU FP8 KV cache requires Intel AMX support",
        ),
        (
            ("--kv-cache-dtype", "fp8_e5m2"),
            "--kv-cache-dtype fp8_e5m2 is not supported on CPU",
        ),
    ],
    ids=["weights-fp8", "kv-e4m3", "kv-e5m2"],
)
def test_what_the_host_itself_refuses_on_cpu(
    flags: tuple[str, ...],
    error: str,
    default_model_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
) -> None:
    """Pool level tests stand for these: a pool of either fp8 dtype is built and relocated there,
    and nothing about KV depends on how weights are stored."""
    model = tiny_model("qwen3", default_model_dir, tmp_path_factory.getbasetemp())
    config = ServerConfig(model=str(model), flags=flags)
    log_path = tmp_path / "server.log"
    process = ServerProcess(config.argv(model), log_path=log_path, progress=None)
    with pytest.raises(ServerFailed), process:
        pass
    assert error in log_path.read_text()


def dump(server: Server, ids: list[int], path: Path, **fields: Any) -> dict[str, Any]:
    extra_key = fields.pop("extra_key", None)
    options = {"seam": 0, **fields}
    server.testing(op="dump", ids=ids, extra_key=extra_key, options=options, path=str(path))
    loaded: dict[str, Any] = torch.load(path)
    return loaded


def expect_rotated(
    name: str, spec: RopeSpec, given: torch.Tensor, got: torch.Tensor, shift: int
) -> None:
    """Every element is the donor's, turned by ``shift`` and rounded once; in all layers."""
    assert (outside(spec, given, got, shift) == 0).all(), name
    # The control: one position further, or not turned at all, and every token is outside.
    for wrong in (shift + 1, 0):
        assert outside(spec, given, got, wrong).flatten(1).any(dim=1).all(), name
    latent = given.shape[-1] - spec.head_dim
    assert same_bytes(given[..., :latent], got[..., :latent]), name


def outside(spec: RopeSpec, given: torch.Tensor, got: torch.Tensor, shift: int) -> torch.Tensor:
    """Bool: elements of ``got`` that are not the rounded rotation of ``given`` by ``shift``."""
    before, after = rope_part(spec, given), rope_part(spec, got)
    want = torch.from_numpy(spec.rotate(before.numpy(), shift))
    largest = before.abs().amax(dim=-1, keepdim=True)
    return (after - want).abs() > arithmetic_bound(given.dtype, want, largest)


def expect_exact(
    name: str,
    spec: RopeSpec,
    given: torch.Tensor,
    got: torch.Tensor,
    want: torch.Tensor,
    shift: int,
) -> None:
    """The keys are those that this server computes at the target."""
    target = rope_part(spec, want)
    assert relative_error(rope_part(spec, got), target) < K_BOUND, name
    for wrong in (shift + 1, 0):
        turned = torch.from_numpy(spec.rotate(rope_part(spec, given).numpy(), wrong))
        assert relative_error(turned, target) > 2 * K_BOUND, name


def rope_part(spec: RopeSpec, keys: torch.Tensor) -> torch.Tensor:
    """fp64 [tokens, heads, head_dim]: all of a key, or the rope part of an MLA row."""
    return keys[..., -spec.head_dim :].double()


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))
