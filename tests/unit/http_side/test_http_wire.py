"""Under msgpack IPC a request that the scheduler could not read is refused before it leaves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers import io_struct
from sglang.srt.managers.io_struct import SessionParams
from sglang.srt.sampling.sampling_params import SamplingParams

from kvedit.errors import BadRequest
from sglang_patches.http.decoding import check_wire


def check(backend: str = "kvedit", **parts: Any) -> None:
    manager = SimpleNamespace(server_args=SimpleNamespace(radix_cache_backend=backend))
    tokenized = SimpleNamespace(**parts)
    assert check_wire(tokenized, manager, None) is tokenized


BAD: list[dict[str, Any]] = [
    {"sampling_params": SamplingParams(custom_params={"x": {"y": ["a"]}})},
    {"sampling_params": SamplingParams(custom_params={"x": 2**70})},
    {"sampling_params": SamplingParams(custom_params={"x": "\ud800"})},
    {"sampling_params": SamplingParams(custom_params={"x": [[1]]})},
    {"session_params": SessionParams(id=5)},  # type: ignore[arg-type]
]


@pytest.mark.parametrize("parts", BAD)
def test_what_would_end_the_scheduler_is_a_400(
    monkeypatch: pytest.MonkeyPatch, parts: dict[str, Any]
) -> None:
    monkeypatch.setattr(io_struct, "_USE_PICKLE_IPC", False)
    [name] = parts
    with pytest.raises(BadRequest, match=f"{name}: expected values of the host's types"):
        check(**parts)
    check(backend="other", **parts)
    monkeypatch.setattr(io_struct, "_USE_PICKLE_IPC", True)
    check(**parts)


def test_what_it_reads_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_struct, "_USE_PICKLE_IPC", False)
    custom = {"kvedit": "{}", "a": [1, None], "b": {"c": 1.5}}
    params = SamplingParams(custom_params=custom, stop=["\U0001f600"])
    check(sampling_params=params, session_params=SessionParams(id="s"))
    check(sampling_params=params)
