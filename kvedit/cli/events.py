"""kvedit events"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from kvedit.cli.connect import add_connection, connect
from kvedit.errors import Forbidden


def add_parser(subparsers: Any) -> None:
    """Add ``events``; sets ``func(args) -> exit status``."""
    parser = subparsers.add_parser(
        "events", help="follow skill and splice events of a server on this host (admin)"
    )
    parser.add_argument("--count", type=int, help="stop after this many events")
    add_connection(parser)
    parser.set_defaults(func=_events)


def _events(args: argparse.Namespace) -> int:
    address = connect(args).status().get("events")
    if address is None:
        raise Forbidden(
            "kvedit: events: expected the address of the event socket, got none "
            "(it is shown to admins only, set KVEDIT_ADMIN_API_KEY)"
        )
    follow(address, args.count)
    return 0


def follow(address: str, count: int | None) -> None:
    """Print each event, one JSON object per line, until ``count`` or Ctrl-C.

    Frames are [topic, JSON]. The socket answers no question: what happened before is not shown.
    """
    import zmq

    num_left = -1 if count is None else count
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(address)
        print(f"kvedit: following {address}", file=sys.stderr, flush=True)
        try:
            while num_left != 0:
                print(socket.recv_multipart()[-1].decode(), flush=True)
                num_left -= 1
        except KeyboardInterrupt:
            return
