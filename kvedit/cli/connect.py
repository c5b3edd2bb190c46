"""Arguments that every command which talks to a server has, and the client they make."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

from kvedit.client import Client

DEFAULT_URL = "http://127.0.0.1:30000"


def add_connection(parser: argparse.ArgumentParser) -> None:
    """``--url``; keys come from the environment, where a process list does not show them."""
    parser.add_argument(
        "--url",
        default=os.environ.get("KVEDIT_URL", DEFAULT_URL),
        help="server to talk to (default: $KVEDIT_URL, else %(default)s); keys are read from "
        "$KVEDIT_API_KEY and $KVEDIT_ADMIN_API_KEY",
    )


def add_namespace(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cache-salt", help="cache salt of the namespace")
    parser.add_argument("--extra-key", help="extra key of the namespace")


def finish_command(
    parser: argparse.ArgumentParser, func: Callable[[argparse.Namespace], int]
) -> None:
    """The arguments of a command on one namespace, and what runs it."""
    add_namespace(parser)
    add_connection(parser)
    parser.set_defaults(func=func)


def connect(args: argparse.Namespace, *, timeout_s: float = 600.0) -> Client:
    env = os.environ
    keys = env.get("KVEDIT_API_KEY"), env.get("KVEDIT_ADMIN_API_KEY")
    return Client(args.url, *keys, timeout_s=timeout_s)


def namespace_of(args: argparse.Namespace) -> dict[str, str | None]:
    return {"cache_salt": args.cache_salt, "extra_key": args.extra_key}
