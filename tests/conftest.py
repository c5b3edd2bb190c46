"""Fixtures that every test folder may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

from kvedit.workbench.model_store import default_model_dir as find_default_model
from sglang_patches import cpu

cpu.prepare()  # before any test module imports sglang, on a host without a GPU

# No test asserts a time. The daily run tries the same examples each time, a long one looks for new.
settings.register_profile(
    "kvedit", deadline=None, derandomize=os.environ.get("KVEDIT_TEST_LONG") != "1"
)
settings.load_profile("kvedit")


@pytest.fixture(scope="session")
def default_model_dir() -> Path:
    """The converted default model; scripts/test has fetched it, plain pytest says how to."""
    return find_default_model()
