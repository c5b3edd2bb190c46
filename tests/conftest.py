"""Fixtures that every test folder may use."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvedit.modelstore import default_model_dir as find_default_model
from sglang_patches import cpu

cpu.prepare()  # before any test module imports sglang, on a host without a GPU


@pytest.fixture(scope="session")
def default_model_dir() -> Path:
    """The converted default model; scripts/test has fetched it, plain pytest says how to."""
    return find_default_model()
