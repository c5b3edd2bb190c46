"""Start-up refusals against real ServerArgs records: each rule fires, alone and together."""

from __future__ import annotations

from typing import Any

import pytest

from kvedit.errors import Unsupported
from sglang_patches.cpu import prepare

pytestmark = pytest.mark.own_process
prepare()

from sglang.srt.arg_groups.overrides import declare_resolution  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

from sglang_patches.host import refusals  # noqa: E402
from sglang_patches.host.server_args import REFUSED, TESTED, UNTESTED  # noqa: E402

NOBODY: frozenset[str] = frozenset()

REFUSED_VALUES: dict[str, Any] = {
    "speculative_algorithm": "EAGLE",
    "pp_size": 2,
    "dp_size": 2,
    "attn_dp_size": 2,
    "disaggregation_mode": "prefill",
    "decoupled_spec_role": "verifier",
    "hicache_storage_backend": "file",
    "kv_events_config": '{"publisher":"zmq"}',
    "tokenizer_worker_num": 2,
    "grpc_port": 30001,
    "chunked_prefill_size": -1,
    "elastic_ep_backend": "mooncake",
    "elastic_ep_initial_size": 2,
    "ep_join_mode": "scale",
    "lora_paths": ["a=/b"],
    "dllm_algorithm": "LowConfidence",
    "radix_cache_backend": None,
}
"""Per rule a value it must refuse; the switches that are missing here are refused when True."""


def record(**given: Any) -> ServerArgs:
    return ServerArgs(**{"model_path": "m", "radix_cache_backend": "kvedit", **given})


def test_the_plain_server_passes() -> None:
    refusals.check_server_args(record(), allow=NOBODY)


def test_what_a_cpu_host_adds_passes() -> None:
    cpu = record(
        device="cpu",
        attention_backend="torch_native",
        sleep_on_idle=True,
        chunked_prefill_size=2048,
        max_total_tokens=3000,
        page_size=16,
        disable_overlap_schedule=True,
        enable_metrics=True,
    )
    refusals.check_server_args(cpu, allow=NOBODY)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_each_refused_argument_is_named(name: str) -> None:
    value = REFUSED_VALUES.get(name, True)
    reasons = refusals.refusals(record(**{name: value}), allow=NOBODY)
    flag = "--" + name.replace("_", "-")
    assert any(reason.startswith(f"{flag}: expected ") for reason in reasons), reasons
    assert all(repr(value) in reason for reason in reasons if reason.startswith(flag + ":"))


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_no_allowance_lifts_a_refusal(name: str) -> None:
    refused = record(**{name: REFUSED_VALUES.get(name, True)})
    assert refusals.refusals(refused, allow=frozenset({name}))


def test_all_reasons_come_at_once() -> None:
    with pytest.raises(Unsupported) as caught:
        refusals.check_server_args(
            record(pp_size=2, disable_radix_cache=True, tp_size=3, page_size=64), allow=NOBODY
        )
    flags = [reason.split(":")[0] for reason in caught.value.reasons]
    assert flags == ["--pp-size", "--disable-radix-cache", "--page-size", "--tp-size"]


def different_from(default: Any) -> Any:
    if isinstance(default, bool):
        return not default
    return "other" if isinstance(default, str) else 12345


@pytest.mark.parametrize("name", sorted(UNTESTED))
def test_untested_arguments_are_refused_by_name_and_can_be_allowed(name: str) -> None:
    changed = record(**{name: different_from(refusals.default_values(ServerArgs)[name])})
    (reason,) = refusals.refusals(changed, allow=NOBODY)
    assert reason.startswith("--" + name.replace("_", "-") + ": ")
    assert f"KVEDIT_ALLOW={name}" in reason
    assert refusals.refusals(changed, allow=frozenset({name})) == []


@pytest.mark.parametrize("name", sorted(n for n, values in TESTED.items() if values is not None))
def test_untested_values_of_tested_arguments_are_refused(name: str) -> None:
    (reason,) = refusals.refusals(record(**{name: "elsewhere"}), allow=NOBODY)
    assert "got 'elsewhere'" in reason


def test_tested_values_pass() -> None:
    tested = record(tp_size=2, schedule_policy="lpm", attention_backend="flashinfer", page_size=16)
    refusals.check_server_args(tested, allow=NOBODY)


def test_allow_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVEDIT_ALLOW", "tp_size, schedule_policy")
    refusals.check_server_args(record(tp_size=4, schedule_policy="random"))


def test_what_the_host_makes_of_a_flag_counts() -> None:
    """A model hook may switch the cache off or choose a page, which no flag shows."""
    resolved = record()
    declare_resolution(resolved, "a model hook", disable_radix_cache=True, page_size=64)
    flags = [reason.split(":")[0] for reason in refusals.refusals(resolved, allow=NOBODY)]
    assert flags == ["--disable-radix-cache", "--page-size"]


def test_host_choices_inside_the_tested_values_pass() -> None:
    resolved = record()
    declare_resolution(resolved, "the host", chunked_prefill_size=8192, page_size=1, device="cuda")
    refusals.check_server_args(resolved, allow=NOBODY)


def test_another_host_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "version", lambda name: "0.5.24")
    (reason,) = refusals.refusals(record(), allow=NOBODY)
    assert reason == "sglang: expected version 0.5.23, got 0.5.24"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SGLANG_RUST_SERVER", "1"),
        ("SGLANG_RADIX_FORCE_MISS", "1"),
        ("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", "python"),
    ],
)
def test_environment_switches(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    (reason,) = refusals.refusals(record(), allow=NOBODY)
    assert reason.startswith(f"{name}: expected ")


class Model:
    is_multimodal = False
    is_encoder_decoder = False
    is_generation = True


@pytest.mark.parametrize(
    "kind", [{"is_multimodal": True}, {"is_encoder_decoder": True}, {"is_generation": False}]
)
def test_kinds_of_model(kind: dict[str, bool]) -> None:
    model = Model()
    assert refusals.refusals(record(), model, NOBODY) == []
    vars(model).update(kind)
    (reason,) = refusals.refusals(record(), model, NOBODY)
    assert reason.startswith("model: expected a text-only causal language model, got ")


def test_a_bad_variable_of_ours_is_one_reason_among_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVEDIT_TRUST", "everybody")
    found = refusals.refusals(record(pp_size=2))
    assert "KVEDIT_TRUST: expected one of tokens, replies, names, got 'everybody'" in found
    assert found[1:] == refusals.refusals(record(pp_size=2), allow=NOBODY) != []
