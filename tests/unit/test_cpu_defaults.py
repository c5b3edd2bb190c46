"""CPU defaults: only flags the user did not give; a pool that fits; what --stock leaves out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_patches.cpu import defaults
from sglang_patches.launch import serve


def test_every_default_is_added_to_a_bare_command() -> None:
    flags = defaults.with_cpu_defaults([])
    for flag in ("--device", "--attention-backend", "--sleep-on-idle", "--max-total-tokens"):
        assert flags.count(flag) == 1


@pytest.mark.parametrize(
    "given",
    [
        ["--device", "cuda"],
        ["--device=cuda"],
        ["--max-total-tokens", "3000"],
        ["--chunked-prefill-size=512"],
        ["--attention-backend=intel_amx"],
        ["--sleep-on-idle"],
    ],
)
def test_the_users_flag_wins_in_both_spellings(given: list[str]) -> None:
    flags = defaults.with_cpu_defaults(given)
    name = given[0].partition("=")[0]
    assert flags[: len(given)] == given
    assert [flag.partition("=")[0] for flag in flags].count(name) == 1


def write_config(folder: Path, **changes: object) -> str:
    config = {
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "hidden_size": 576,
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_kv_bytes_of_a_token(tmp_path: Path) -> None:
    assert defaults.kv_bytes_per_token(write_config(tmp_path)) == 2 * 30 * 3 * 64 * 2
    assert defaults.kv_bytes_per_token(write_config(tmp_path, head_dim=128)) == 2 * 30 * 3 * 128 * 2
    no_groups = write_config(tmp_path, num_key_value_heads=None)
    assert defaults.kv_bytes_per_token(no_groups) == 2 * 30 * 9 * 64 * 2


def test_the_pool_takes_a_quarter_of_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_config(tmp_path)
    per_token = 2 * 30 * 3 * 64 * 2
    monkeypatch.setattr(defaults, "available_memory_bytes", lambda: 40_000 * per_token)
    assert defaults.default_pool_tokens(model) == 10_000
    monkeypatch.setattr(defaults, "available_memory_bytes", lambda: 10**15)
    assert defaults.default_pool_tokens(model) == defaults.MAX_DEFAULT_POOL_TOKENS
    assert defaults.default_pool_tokens("org/hub-name") == defaults.FALLBACK_POOL_TOKENS


@pytest.mark.parametrize(
    ("argv", "model"),
    [(["--model-path", "a"], "a"), (["--model=b"], "b"), (["--model-path"], None), ([], None)],
)
def test_the_model_is_found_in_the_flags(argv: list[str], model: str | None) -> None:
    assert defaults.value_of_model(argv) == model


@pytest.fixture
def gpu_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "IS_CPU_HOST", False)
    ours = (*serve.OWN_FLAGS.values(), *serve.OWN_VALUES.values())
    for name in ("SGLANG_PLUGINS", *ours):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("gpu_host")
def test_a_gpu_host_gets_three_flags_and_nothing_else() -> None:
    flags = serve.launcher_arguments(["--model-path", "m", "--tp", "2"])
    added = ["--radix-cache-backend", "kvedit", "--enable-metrics", "--enable-cache-report"]
    assert flags == ["--model-path", "m", "--tp", "2", *added]


@pytest.mark.usefixtures("gpu_host")
def test_stock_runs_without_our_plugin_but_with_the_cpu_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serve, "installed_plugins", lambda: ["kvedit", "kvedit_cpu", "other"])
    flags = serve.launcher_arguments(["--stock", "--model-path", "m"])
    assert flags == ["--model-path", "m", "--enable-metrics", "--enable-cache-report"]
    assert serve.os.environ["SGLANG_PLUGINS"] == "other,kvedit_cpu"
    assert serve.plugins_without_kvedit("kvedit, mine") == "mine,kvedit_cpu"
    monkeypatch.delenv("SGLANG_PLUGINS")


@pytest.mark.usefixtures("gpu_host")
def test_our_switches_become_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = serve.launcher_arguments(["--kvedit-open", "--model-path", "m"])
    assert "--kvedit-open" not in flags
    assert serve.os.environ["KVEDIT_OPEN"] == "1"
    assert "KVEDIT_CLIENT_SKILLS" not in serve.os.environ
    monkeypatch.delenv("KVEDIT_OPEN")


@pytest.mark.usefixtures("gpu_host")
@pytest.mark.parametrize("spelled", [["--kvedit-report", "off"], ["--kvedit-report=off"]])
def test_our_flag_with_a_value_becomes_a_variable(
    monkeypatch: pytest.MonkeyPatch, spelled: list[str]
) -> None:
    flags = serve.launcher_arguments([*spelled, "--kvedit-exact", "--model-path=m", "--tp", "2"])
    assert flags[:3] == ["--model-path=m", "--tp", "2"]
    assert (serve.os.environ["KVEDIT_REPORT"], serve.os.environ["KVEDIT_EXACT"]) == ("off", "1")
    monkeypatch.delenv("KVEDIT_REPORT")
    monkeypatch.delenv("KVEDIT_EXACT")


def test_a_bad_value_of_ours_is_refused_before_the_host_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "problems_of", lambda _: [])
    monkeypatch.setattr(serve.sys, "argv", ["serve"])
    monkeypatch.setenv("KVEDIT_REPORT", "on")
    with pytest.raises(SystemExit):
        serve.main(["--stock", "--kvedit-report", "maybe"])
    assert "KVEDIT_REPORT: expected on or off, got 'maybe'" in capsys.readouterr().err


@pytest.mark.parametrize("given", [["--kvedit-trust", "names"], ["--kvedit-trust=names"]])
def test_our_settings_become_variables(monkeypatch: pytest.MonkeyPatch, given: list[str]) -> None:
    monkeypatch.setenv("KVEDIT_TRUST", "tokens")
    flags = serve.launcher_arguments(["--tp", "1", *given, "--model-path", "m"])
    assert flags[:4] == ["--tp", "1", "--model-path", "m"]
    assert serve.os.environ["KVEDIT_TRUST"] == "names"
