"""Every host symbol that the HTTP side hooks exists and still has the parameters the hook names."""

from __future__ import annotations

import inspect
import pkgutil
from typing import Any

import pytest

from sglang_patches.http import register_http_hooks


class Registry:
    def __init__(self) -> None:
        self.hooks: dict[str, tuple[Any, str]] = {}

    def register(self, target: str, hook: Any, kind: str) -> None:
        self.hooks[target] = (hook, kind)


class Kind:
    AROUND = "around"
    BEFORE = "before"
    AFTER = "after"


def hooks() -> dict[str, tuple[Any, str]]:
    registry = Registry()
    register_http_hooks(registry, Kind)
    return registry.hooks


@pytest.mark.parametrize("target", hooks())
def test_the_hook_takes_the_parameters_of_the_installed_host(target: str) -> None:
    hook, kind = hooks()[target]
    host = inspect.signature(pkgutil.resolve_name(target))
    ours = list(inspect.signature(hook).parameters.values())
    if kind in (Kind.AROUND, Kind.AFTER):
        ours = ours[1:]  # the original, or its result
    if any(p.kind is p.VAR_KEYWORD for p in ours) and ours[0].kind is not ours[0].VAR_KEYWORD:
        ours = [p for p in ours if p.kind is p.POSITIONAL_OR_KEYWORD]
        names = list(host.parameters)[: len(ours)]
    elif ours[0].kind is ours[0].VAR_KEYWORD:  # the host calls it by keywords only
        assert set(host.parameters) >= {"method", "path", "authorization_header"}
        assert {p.kind for p in host.parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}
        return
    else:
        names = list(host.parameters)
    renamed = {"self": ours[0].name}
    spelled = [renamed.get(name, name) for name in names]
    assert spelled == [p.name for p in ours]


def test_generate_request_is_an_async_generator_and_the_others_are_what_the_hooks_expect() -> None:
    def resolve(end: str) -> Any:
        return next(pkgutil.resolve_name(name) for name in hooks() if name.endswith(end))

    assert inspect.isasyncgenfunction(resolve(".generate_request"))
    assert inspect.iscoroutinefunction(resolve(".handle_request"))
    assert inspect.iscoroutinefunction(resolve("._handle_abort_finish_reason"))
    assert not inspect.iscoroutinefunction(resolve(".update_request_meta_info"))
    assert not inspect.iscoroutinefunction(resolve("._setup_and_run_http_server"))
