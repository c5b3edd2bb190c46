"""Every attribute of a host protocol stands in the host's class, by this name."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from typing import Any

import pytest

from sglang_patches import cpu

cpu.prepare()

from sglang_patches.host.protocols import HOST_CLASSES, Request  # noqa: E402


def host_class(path: str) -> type:
    module, _, name = path.rpartition(".")
    found: type = getattr(importlib.import_module(f"sglang.srt.{module}"), name)
    return found


def mentioned(cls: type) -> set[str]:
    """Names that the methods of ``cls`` set or read on their ``self``."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def attributes(cls: type) -> set[str]:
    own = [base for base in cls.__mro__ if base.__module__.startswith("sglang")]
    annotated = {name for base in own for name in base.__dict__.get("__annotations__", ())}
    return annotated.union(dir(cls), *map(mentioned, own))


def touched(protocol: type) -> set[str]:
    methods = {name for name, value in vars(protocol).items() if not name.startswith("_")}
    return methods | set(protocol.__annotations__)


@pytest.mark.parametrize("protocol", HOST_CLASSES, ids=lambda protocol: protocol.__name__)
def test_the_host_has_what_the_protocol_names(protocol: type) -> None:
    assert touched(protocol) - attributes(host_class(HOST_CLASSES[protocol])) == set()


@pytest.mark.parametrize("protocol", HOST_CLASSES, ids=lambda protocol: protocol.__name__)
def test_methods_take_what_the_protocol_says(protocol: type) -> None:
    cls = host_class(HOST_CLASSES[protocol])
    for name, method in vars(protocol).items():
        if name.startswith("_") or not inspect.isfunction(method):
            continue
        wanted = [p for p in inspect.signature(method).parameters if p != "self"]
        theirs = list(inspect.signature(getattr(cls, name)).parameters)[1:]
        assert theirs[: len(wanted)] == wanted, name


def test_a_name_that_the_host_does_not_have_is_seen() -> None:
    class Wrong(Request):
        prefixlen: Any

    assert "prefixlen" in touched(Wrong) - attributes(host_class(HOST_CLASSES[Request]))
