"""kvedit fields add|list|show|remove"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from kvedit.cli.connect import (
    add_list,
    add_remove,
    add_show,
    connect,
    finish_command,
    namespace_of,
)
from kvedit.cli.table import print_table
from kvedit.edit.proofs import CHOICES
from kvedit.errors import Conflict
from kvedit.fields.declaration import ROLES
from kvedit.request.strategy import STRATEGIES

_COLUMNS = ("name", "pattern", "strategy", "where", "base", "shared")


def add_parser(subparsers: Any) -> None:
    """Add ``fields`` and its four commands; each sets ``func(args) -> exit status``."""
    parser = subparsers.add_parser("fields", help="declare, list, show and remove fields")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    add = commands.add_parser("add", help="declare a place in prompts whose value may change")
    add.add_argument("name", help="1 to 200 characters, no /")
    add.add_argument("--pattern", required=True, help="one line of text with one {value}")
    add.add_argument("--strategy", choices=STRATEGIES, help="what a change is served by")
    add.add_argument("--base", help="the value that the cached prompt has")
    add.add_argument("--role", choices=ROLES, help="messages to look in (default: system)")
    add.add_argument("--occurrence", type=int, help="which of them, from 1 (default: 1)")
    add.add_argument("--within", type=int, help="raw text: look in the first WITHIN tokens")
    add.add_argument("--anchor", help="the line goes directly before this text's last occurrence")
    add.add_argument(
        "--template",
        help="the line: one {value}, at most one {name} and one {label} (the pattern's beginning)",
    )
    add.add_argument(
        "--cross-request", action="store_true", help="values are public inside the namespace"
    )
    add.add_argument("--shared", action="store_true", help="for every namespace")
    add.add_argument("--replace", action="store_true", help="take the place of other content")
    finish_command(add, _add)

    add_list(commands, "field", _list)
    add_show(commands, "field", _show)
    add_remove(commands, "field", _remove, what="forget a field")


def _add(args: argparse.Namespace) -> int:
    try:
        view = connect(args).fields.add(
            args.name,
            pattern=args.pattern,
            strategy=args.strategy,
            base=args.base,
            role=args.role,
            occurrence=args.occurrence,
            within=args.within,
            anchor=args.anchor,
            template=args.template,
            cross_request=args.cross_request,
            namespace=None if args.shared else namespace_of(args),
            shared=args.shared,
            replace=args.replace,
        )
    except Conflict as error:  # the server names the key of its API
        raise Conflict(str(error).replace("replace=true", "--replace")) from None
    print(json.dumps(view, indent=2))
    if not args.cross_request:  # on stderr: stdout is one JSON object
        print(
            f"kvedit: old values come from the caller's own turns only: {CHOICES}", file=sys.stderr
        )
    return 0


def _list(args: argparse.Namespace) -> int:
    fields = connect(args).fields.list(namespace=namespace_of(args))
    if args.json:
        print("\n".join(map(json.dumps, fields)))
    else:
        print_table(_COLUMNS, [_row(field) for field in fields])
    return 0


def _row(field: dict[str, Any]) -> dict[str, Any]:
    base = "-" if field["base"] is None else field["base"]
    return {**field, "where": _where(field["where"]), "base": base}


def _where(where: dict[str, Any]) -> str:
    """ "system 1", or "first 400 tokens"."""
    if "within" in where:
        return f"first {where['within']} tokens"
    return f"{where['role']} {where['occurrence']}"


def _show(args: argparse.Namespace) -> int:
    view = connect(args).fields.show(args.name, namespace=namespace_of(args))
    print(json.dumps(view, indent=2))
    return 0


def _remove(args: argparse.Namespace) -> int:
    view = connect(args).fields.remove(args.name, namespace=namespace_of(args), shared=args.shared)
    print(json.dumps(view, indent=2))
    return 0
