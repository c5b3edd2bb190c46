"""What can be told from the server flags alone, before SGLang is imported or a model is read.

Flags that kvedit does not know stay SGLang's matter, and so do values that may mean something to
it (a hub name, a remote address, a configuration file).
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from pathlib import Path

from kvedit.config import TRUSTS
from kvedit.workbench.model_store import DEFAULT_MODEL, models_dir

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 30000  # SGLang's
TRUST_FLAG = "--kvedit-trust"
MIN_ABBREVIATION = len("--mo")
_ELSEWHERE = ("-h", "--help", "--config")  # no start, or flags that stand in a file


def problems_of(argv: Sequence[str]) -> list[str]:
    """Why a server with these flags cannot start; empty when nothing is known against it."""
    if any(arg.partition("=")[0] in _ELSEWHERE for arg in argv):
        return []
    return [*model_problems(argv), *port_problems(argv), *trust_problems(argv)]


def model_problems(argv: Sequence[str]) -> list[str]:
    """A missing `--model-path`, or one that is spelled as a path and leads nowhere."""
    model = value_of(argv, "--model-path")
    if model is None:
        return [
            "--model-path: expected a model folder or a hub name, got none (scripts/fetch_model "
            f"fetches the default model into {models_dir() / DEFAULT_MODEL})"
        ]
    if is_spelled_as_path(model) and not Path(model).expanduser().exists():
        return [
            f"--model-path: expected a model folder or a hub name, got {model!r} (no such folder)"
        ]
    return []


def is_spelled_as_path(model: str) -> bool:
    """Whether `model` cannot be a hub name (`name` or `owner/name`) or a remote address."""
    return "://" not in model and (model.startswith(("/", ".", "~")) or model.count("/") > 1)


def port_problems(argv: Sequence[str]) -> list[str]:
    """A port that somebody listens on. A host or port that SGLang will refuse is left to it."""
    host = value_of(argv, "--host") or DEFAULT_HOST
    port = value_of(argv, "--port") or str(DEFAULT_PORT)
    if not port.isdecimal() or int(port) > 65535 or is_free(host, int(port)):
        return []
    return [f"--port: expected a free port, got {port} (something listens there)"]


def trust_problems(argv: Sequence[str]) -> list[str]:
    """A `--kvedit-trust` that is none of its values."""
    if not any(arg.partition("=")[0] == TRUST_FLAG for arg in argv):
        return []
    value = value_of(argv, TRUST_FLAG)
    if value in TRUSTS:
        return []
    return [f"{TRUST_FLAG}: expected one of {', '.join(TRUSTS)}, got {value or 'nothing'}"]


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there, as far as this moment tells."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
    except OSError:  # an unknown host is the server's own complaint
        return True
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
        try:
            probe.bind(address)
        except OSError as error:
            return error.errno != errno.EADDRINUSE
    return True


def value_of(argv: Sequence[str], flag: str) -> str | None:
    """The last value of `flag`, also abbreviated as the host's parser allows; None when absent."""
    value = None
    for position, arg in enumerate(argv):
        name, has_equals, inline = arg.partition("=")
        if len(name) >= MIN_ABBREVIATION and flag.startswith(name):
            value = inline if has_equals else next(iter(argv[position + 1 : position + 2]), None)
    return value
