"""kvedit status"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from kvedit.cli.connect import add_connection, connect

WARNINGS = "warnings"  # [text]
SPLICES = "counters.splices"  # [{"outcome", "reason", "count"}]
EDITS = "counters.edits"  # [{"kind", "base", "count"}]


def add_parser(subparsers: Any) -> None:
    """Add ``status``; sets ``func(args) -> exit status``."""
    parser = subparsers.add_parser("status", help="skills, counters and KV pool of a server")
    parser.add_argument("--json", action="store_true", help="the server's answer as it is")
    add_connection(parser)
    parser.set_defaults(func=_status)


def _status(args: argparse.Namespace) -> int:
    status = connect(args).status()
    if args.json:
        print(json.dumps(status))
        return 0
    rows = list(_rows("", status))
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name.ljust(width)}  {value}")
    return 0


def _rows(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """("pool.size", 3000), ... for a nested object; an empty object or list is one row, "none"."""
    if value in ({}, []):
        yield prefix, "none"
    elif prefix == SPLICES:
        for counted in value:
            yield f"{prefix}.{counted['outcome']}", _count_and_reason(counted)
    elif prefix == EDITS:
        for counted in value:
            yield f"{prefix}.{counted['kind']}", f"{counted['count']} on base {counted['base']}"
    elif prefix == WARNINGS:
        for warning in value:
            yield prefix, warning
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _rows(f"{prefix}.{key}" if prefix else key, inner)
    else:
        yield prefix, value


def _count_and_reason(counted: dict[str, Any]) -> str:
    count, reason = counted["count"], counted["reason"]
    return f"{count} ({reason})" if reason else str(count)
