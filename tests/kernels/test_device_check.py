"""scripts/device_check without a device: its logic runs, and it refuses to invent numbers."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

REPO_ROOT = Path(__file__).resolve().parents[2]
STEPS = {"bit_compare", "flashinfer", "copies", "bandwidth", "sweep", "prefill_against_splice"}


def device_check(*arguments: str) -> subprocess.CompletedProcess[str]:
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [str(REPO_ROOT / "scripts" / "device_check"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=hidden, timeout=240)


def test_dry_run_takes_every_step(tmp_path: Path) -> None:
    result = device_check("--dry-run", "--no-server", "--out", str(tmp_path / "report"))
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert set(report) >= STEPS and report["dry_run"] and report["failures"] == []
    assert len(report["bit_compare"]) == 12
    assert [row["passed"] for row in report["copies"]] == [True, True]
    table = (tmp_path / "report.md").read_text()
    assert all(f"## {step}" in table for step in STEPS)


def test_without_a_device_it_says_so(tmp_path: Path) -> None:
    result = device_check("--out", str(tmp_path / "report"))
    assert result.returncode == 2
    assert "expected a CUDA device, got none" in result.stdout
    assert not (tmp_path / "report.json").exists()
