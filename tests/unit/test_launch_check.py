"""What `kvedit serve` refuses from its flags alone: one line, status 2, nothing loaded."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_patches.launch import serve
from sglang_patches.launch.preflight import (
    model_problems,
    port_problems,
    problems_of,
    trust_problems,
    value_of,
)


@pytest.fixture
def taken_port() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield str(listener.getsockname()[1])


@pytest.mark.parametrize("model", ["/nonexist", "./nonexist", "~/nonexist", "a/b/c", "../no"])
def test_a_path_that_leads_nowhere_is_named(model: str) -> None:
    (problem,) = model_problems(["--model-path", model])
    assert problem == (
        f"--model-path: expected a model folder or a hub name, got '{model}' (no such folder)"
    )


@pytest.mark.parametrize("model", ["Qwen/Qwen3-0.6B", "gpt2", "s3://bucket/some/model"])
def test_what_may_be_a_hub_name_or_an_address_is_left_to_the_host(model: str) -> None:
    assert model_problems([f"--model={model}"]) == []


def test_a_folder_that_exists_passes(tmp_path: Path) -> None:
    assert model_problems(["--model-path", str(tmp_path)]) == []


def test_no_model_names_the_script_that_fetches_one() -> None:
    (problem,) = model_problems(["--tp", "2"])
    assert "scripts/fetch_model" in problem and "smollm2" in problem


def test_a_port_in_use_is_named_and_a_free_one_passes(taken_port: str) -> None:
    (problem,) = port_problems(["--port", taken_port])
    assert problem == f"--port: expected a free port, got {taken_port} (something listens there)"
    assert port_problems(["--host", "0.0.0.0", f"--port={taken_port}"]) != []
    assert port_problems(["--port", "0"]) == []


@pytest.mark.parametrize(
    "argv",
    [
        ["--port", "many"],
        ["--port", "70000"],
        ["--host", "no.such.host.invalid"],
    ],
)
def test_values_that_are_no_port_or_host_are_left_to_the_host(argv: list[str]) -> None:
    assert port_problems(argv) == []


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["--config", "f"], ["--config=f"]])
def test_without_a_start_or_with_a_file_of_flags_nothing_is_judged(argv: list[str]) -> None:
    assert problems_of(argv) == []


def test_the_last_value_counts_as_for_the_host() -> None:
    argv = ["--model", "a", "--model-path=b", "--model-loader-extra-config", "c", "--port"]
    assert value_of(argv, "--model-path") == "b"
    assert value_of(argv, "--port") is None


def test_serve_ends_with_2_and_all_problems(
    taken_port: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*args: object, **kwargs: object) -> None:
        raise AssertionError("the host was started")

    monkeypatch.setattr("runpy.run_module", started)
    with pytest.raises(SystemExit) as stopped:
        serve.main(["--model-path", "/nonexist", "--port", taken_port])
    assert stopped.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[:2] for line in lines] == [
        ["kvedit", " --model-path"],
        ["kvedit", " --port"],
    ]


@pytest.mark.parametrize(
    ("argv", "got"),
    [
        (["--kvedit-trust", "everybody"], "everybody"),
        (["--kvedit-trust=everybody"], "everybody"),
        (["--kvedit-trust="], "nothing"),
        (["--kvedit-trust"], "nothing"),
    ],
)
def test_a_kind_of_trust_that_does_not_exist_is_refused(argv: list[str], got: str) -> None:
    expected = f"--kvedit-trust: expected one of tokens, replies, names, got {got}"
    assert trust_problems(argv) == [expected]
    assert expected in problems_of(["--model-path", "gpt2", *argv])


@pytest.mark.parametrize("argv", [["--kvedit-trust", "names"], ["--kvedit-trust=replies"], []])
def test_kinds_of_trust_that_exist_pass(argv: list[str]) -> None:
    assert trust_problems(argv) == []
