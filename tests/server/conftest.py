"""Real servers, shared by modules."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.harness import BASE, Server, ServerPool


@pytest.fixture(scope="session")
def servers(
    default_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerPool]:
    pool = ServerPool(default_model_dir, tmp_path_factory.mktemp("server-logs"))
    yield pool
    pool.close()


@pytest.fixture
def base(servers: ServerPool) -> Server:
    return servers.get(BASE)
