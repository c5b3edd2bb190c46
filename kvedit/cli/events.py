"""kvedit events"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from kvedit.cli.connect import add_connection, connect
from kvedit.client import Client
from kvedit.client.transport import NoServer
from kvedit.errors import Forbidden, Unavailable

SILENCE_MS = 5000
CHECK_TIMEOUT_S = 60.0  # a server in a long tokenisation answers late


def add_parser(subparsers: Any) -> None:
    """Add ``events``; sets ``func(args) -> exit status``."""
    parser = subparsers.add_parser(
        "events", help="follow skill and splice events of a server on this host (admin)"
    )
    parser.add_argument("--count", type=int, help="stop after this many events")
    add_connection(parser)
    parser.set_defaults(func=_events)


def _events(args: argparse.Namespace) -> int:
    client = connect(args, timeout_s=CHECK_TIMEOUT_S)
    address = client.status().get("events")
    if address is None:
        raise Forbidden(
            "kvedit: events: expected the address of the event socket, got none "
            "(it is shown to admins only, set KVEDIT_ADMIN_API_KEY)"
        )
    follow(address, args.count, lambda: check_server(client, address))
    return 0


def check_server(client: Client, address: str) -> None:
    """Raises NoServer when the server whose events come out at ``address`` is gone.

    The socket itself shows nothing: a subscriber waits for ever for a publisher that died.
    """
    try:
        now = client.status().get("events")
    except NoServer:
        raise
    except Unavailable:  # its HTTP side lives, the scheduler is in a long forward pass
        return
    if now != address:
        raise NoServer(f"kvedit: events: expected the server at {address}, got one started anew")


def follow(address: str, count: int | None, check_silence: Callable[[], None]) -> None:
    """Print each event, one JSON object per line, until ``count`` or Ctrl-C.

    Frames are [topic, JSON]. The socket answers no question: what happened before is not shown.
    ``check_silence`` is called after every SILENCE_MS without an event; what it raises ends this.
    """
    import zmq

    num_left = -1 if count is None else count
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(address)
        print(f"kvedit: following {address}", file=sys.stderr, flush=True)
        try:
            while num_left != 0:
                if not socket.poll(SILENCE_MS):
                    check_silence()
                    continue
                print(socket.recv_multipart()[-1].decode(), flush=True)
                num_left -= 1
        except KeyboardInterrupt:
            return
