"""Arguments that commands which talk to a server share, and the client they make."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import TypeAlias

from kvedit.client import Client

DEFAULT_URL = "http://127.0.0.1:30000"
Run = Callable[[argparse.Namespace], int]  # gives the exit status
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_connection(parser: argparse.ArgumentParser) -> None:
    """``--url``; keys come from the environment, where a process list does not show them."""
    parser.add_argument(
        "--url",
        default=os.environ.get("KVEDIT_URL", DEFAULT_URL),
        help="server to talk to (default: $KVEDIT_URL, else %(default)s); keys are read from "
        "$KVEDIT_API_KEY and $KVEDIT_ADMIN_API_KEY",
    )


def add_namespace(parser: argparse.ArgumentParser) -> None:
    """``--cache-salt`` and ``--extra-key``; without both it is the default namespace."""
    parser.add_argument("--cache-salt", help="cache salt of the namespace")
    parser.add_argument("--extra-key", help="extra key of the namespace")


def finish_command(parser: argparse.ArgumentParser, func: Run) -> None:
    """The arguments of a command on one namespace, and what runs it."""
    add_namespace(parser)
    add_connection(parser)
    parser.set_defaults(func=func)


def add_list(commands: Commands, kind: str, func: Run) -> argparse.ArgumentParser:
    """``list``, among the commands about one ``kind`` of thing; returns its parser."""
    parser = _command(commands, "list", f"{kind}s of a namespace, and the shared ones", func)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    return parser


def add_show(commands: Commands, kind: str, func: Run) -> None:
    """``show NAME``, among the commands about one ``kind`` of thing."""
    parser = _command(commands, "show", f"one {kind} as JSON", func)
    parser.add_argument("name", help=f"of the namespace, else of the shared {kind}s")


def add_remove(commands: Commands, kind: str, func: Run, *, what: str) -> argparse.ArgumentParser:
    """``remove NAME [--shared]``, described as ``what``; returns its parser."""
    parser = _command(commands, "remove", what, func)
    parser.add_argument("name", help=f"a {kind} of exactly this namespace")
    parser.add_argument("--shared", action="store_true", help=f"the shared {kind} of that name")
    return parser


def _command(commands: Commands, name: str, what: str, func: Run) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=what)
    finish_command(parser, func)
    return parser


def connect(args: argparse.Namespace, *, timeout_s: float = 600.0) -> Client:
    """A client of ``--url`` with the keys of the environment. Raises BadRequest for a bad URL."""
    env = os.environ
    keys = env.get("KVEDIT_API_KEY"), env.get("KVEDIT_ADMIN_API_KEY")
    return Client(args.url, *keys, timeout_s=timeout_s)


def namespace_of(args: argparse.Namespace) -> dict[str, str | None]:
    """What ``add_namespace`` asked for, as ``Client`` takes it; None is what was not given."""
    return {"cache_salt": args.cache_salt, "extra_key": args.extra_key}
