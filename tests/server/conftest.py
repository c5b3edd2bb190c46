"""Real servers, shared by modules."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.harness import BASE, Server, ServerConfig, ServerPool

HERE = Path(__file__).parent
in_order: list[ServerConfig] = []  # configurations as the collected tests will use them


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of one server configuration run together, since a start takes longer than most."""
    ours = [item for item in items if HERE in item.path.parents]
    elsewhere = [item for item in ours if not is_in_shard(item)]
    config.hook.pytest_deselected(items=elsewhere)
    ours = [item for item in ours if item not in set(elsewhere)]
    configs = list(dict.fromkeys([BASE, *map(config_of, ours)]))
    ours.sort(key=lambda item: (runs_last(item), configs.index(config_of(item))))
    items[:] = [item for item in items if HERE not in item.path.parents] + ours
    in_order[:] = dict.fromkeys(config_of(item) for item in ours if not runs_last(item))


def is_in_shard(item: pytest.Item) -> bool:
    """KVEDIT_TEST_SHARD "0/2": tests of the base configuration, about half of the time; "1/2": all
    others. Without it every test."""
    shard = os.environ.get("KVEDIT_TEST_SHARD")
    assert shard in (None, "0/2", "1/2"), f"expected a shard 0/2 or 1/2, got {shard!r}"
    is_base = config_of(item) == BASE and not runs_last(item)
    return shard is None or shard == ("0/2" if is_base else "1/2")


def runs_last(item: pytest.Item) -> bool:
    """Whether the module starts servers of its own kind: they would push the shared ones out."""
    module = item.getparent(pytest.Module)
    return isinstance(module, pytest.Module) and hasattr(module.obj, "RUN_LAST")


def config_of(item: pytest.Item) -> ServerConfig:
    """A test's ``config`` parameter, else its module's CONFIG, else the base configuration."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    config = parameters.get("config")
    if isinstance(config, ServerConfig):
        return config
    module = item.getparent(pytest.Module)
    found = vars(module.obj).get("CONFIG", BASE) if isinstance(module, pytest.Module) else BASE
    return found if isinstance(found, ServerConfig) else BASE


@pytest.fixture(scope="session")
def servers(
    default_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerPool]:
    max_alive = 2 if "KVEDIT_TEST_SHARD" in os.environ else 3  # others run beside these
    logs = tmp_path_factory.mktemp("server-logs")
    pool = ServerPool(default_model_dir, logs, in_order, max_alive)
    yield pool
    pool.close()


@pytest.fixture
def base(servers: ServerPool) -> Server:
    return servers.get(BASE)
