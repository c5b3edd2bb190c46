"""kvedit inside an offline sglang.Engine, and skills behind a BOS (the engine's model adds one)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.server.bos_model import BOS, make_bos_model

pytestmark = pytest.mark.real_server

PROGRAM = Path(__file__).with_name("engine_program.py")
REPO_ROOT = PROGRAM.parents[2]
CLASSES = ("exact", "composed", "derived", "computed")
Seen = dict[str, Any]


@pytest.fixture(scope="module")
def seen(default_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder = tmp_path_factory.mktemp("engine")
    model, results = make_bos_model(default_model_dir, folder / "model"), folder / "seen.json"
    done = subprocess.run(
        [sys.executable, PROGRAM, model, results],
        cwd=REPO_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-4_000:]
    loaded: Seen = json.loads(results.read_text("utf-8"))
    return loaded


def test_without_a_skill_a_request_carries_no_report(seen: Seen) -> None:
    assert "kvedit" not in seen["before"]


def test_the_client_registers_replaces_and_removes(seen: Seen) -> None:
    assert (seen["first"]["version"], seen["first"]["state"]) == (1, "ready")
    assert seen["again"] == seen["first"]
    assert seen["conflict"]["type"] == "Conflict"
    assert (seen["second"]["version"], seen["second"]["state"]) == (2, "ready")
    assert seen["removed"]["dropped"] == 2
    assert seen["missing"]["type"] == "NotFound"
    assert seen["bad_seam"]["type"] == seen["bad_ids"]["type"] == "BadRequest"
    assert [view["name"] for view in seen["listed"]] == ["policy"]
    assert seen["listed_elsewhere"] == []
    assert [row["name"] for row in seen["tree"]] == ["policy"]
    assert seen["audit"] == {"ok": True, "problems": []}
    assert seen["status"]["counters"]["hook_errors"] == {}


def test_the_client_declares_and_removes_fields(seen: Seen) -> None:
    """This model has no chat template: its fields are those of raw text."""
    assert seen["role_refused"]["type"] == "BadRequest"
    assert "chat template" in seen["role_refused"]["message"]
    assert seen["field"].pop("created") is True
    assert seen["field"]["where"] == {"within": 64}
    assert seen["fields"] == [seen["field"]] == [seen["field_removed"]]
    assert seen["fields_elsewhere"] == []
    assert seen["field_missing"]["type"] == "NotFound"
    assert seen["status"]["fields"] == 0


def test_a_text_is_spliced_and_reported_streaming_or_not(seen: Seen) -> None:
    [report] = seen["whole"]["kvedit"]
    [span] = report["spans"]
    assert span["skill"] == "policy" and report["refused"] == []
    assert report["composed"] == span["stop"] - span["start"]
    assert report["composed"] >= seen["policy"]["num_tokens"] - 32
    assert sum(report[kind] for kind in CLASSES) == seen["whole"]["prompt_tokens"]
    assert seen["report"] == report
    assert seen["report_elsewhere"]["type"] == "NotFound"
    *before, last = seen["stream"]
    assert last["kvedit"][0]["computed"] == 1 and last["kvedit"][0]["copied"] == 0
    assert not any("kvedit" in chunk for chunk in (*before, *seen["plain_stream"]))
    assert seen["elsewhere"]["kvedit"][0]["composed"] == 0


def test_refusals_are_value_errors_and_the_engine_lives(seen: Seen) -> None:
    assert "nobody: unknown_skill" in seen["unmet"]["message"]
    assert "input_ids[1]: expected an int in [0, 49152)" in seen["outside"]["message"]
    assert seen["unmet"]["value"] and seen["outside"]["value"]
    assert len(seen["lives"]) == 1


def test_a_skill_behind_bos_equals_exact_reuse_bit_for_bit(seen: Seen) -> None:
    assert seen["bos_text_ids"][0] == BOS
    assert seen["bos_segment"]["compile_prefix_tokens"] == 1
    num_tokens = seen["bos_skill"]["num_tokens"]
    spliced, exact = (seen[arm]["meta_info"] for arm in ("spliced", "exact"))
    [span] = spliced["kvedit"][0]["spans"]
    assert (span["start"], span["stop"], span["seam"]) == (1, 1 + num_tokens, 0)
    assert span["delta"] == 0, "the shift counts from the compile prefix"
    assert spliced["kvedit"][0]["exact"] == 1
    assert spliced["kvedit"][0]["composed"] == num_tokens
    assert exact["kvedit"][0]["exact"] == 1 + num_tokens
    assert seen["spliced"]["output_ids"] == seen["exact"]["output_ids"]
    assert spliced["output_top_logprobs"] == exact["output_top_logprobs"]


def test_the_numbers_would_tell_a_skill_one_position_off(seen: Seen) -> None:
    """The control of the test above: one more token in front changes what it compares."""
    exact, shifted = (seen[arm]["meta_info"] for arm in ("exact", "shifted"))
    assert exact["output_top_logprobs"] != shifted["output_top_logprobs"]
