"""kvedit skills add|list|show|remove"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
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
from kvedit.errors import BadRequest, Conflict

_COLUMNS = ("name", "version", "num_tokens", "state", "shared", "pinned", "uses")


def add_parser(subparsers: Any) -> None:
    """Add ``skills`` and its four commands; each sets ``func(args) -> exit status``."""
    parser = subparsers.add_parser("skills", help="register, list, show and remove skills")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    add = commands.add_parser("add", help="compile a text and register it under a name")
    add.add_argument("name", help="1 to 200 characters, no /")
    add.add_argument("file", nargs="?", default="-", help="UTF-8 text (default: standard input)")
    add.add_argument("--ids", action="store_true", help="the file is a JSON list of token ids")
    add.add_argument("--shared", action="store_true", help="for every namespace (admin)")
    add.add_argument("--pin", action="store_true", help="keep it in the cache while room lasts")
    add.add_argument("--seam", type=int, help="tokens recomputed at the front of each splice")
    add.add_argument("--replace", action="store_true", help="take the place of other content")
    add.add_argument("--memory", action="store_true", help="the text may hold declared fields")
    finish_command(add, _add)

    listed = add_list(commands, "skill", _list)
    listed.add_argument("--all", action="store_true", help="of all namespaces (admin)")
    add_show(commands, "skill", _show)
    remove = add_remove(commands, "skill", _remove, what="retire a skill")
    remove.add_argument("--purge", action="store_true", help="drop its cached paths as well")


def _add(args: argparse.Namespace) -> int:
    text = _text_of(args.file)
    given: dict[str, Any] = {"input_ids": _ids_in(text, args.file)} if args.ids else {"text": text}
    try:
        view = connect(args).register(
            args.name,
            **given,
            namespace=None if args.shared else namespace_of(args),
            shared=args.shared,
            pin=args.pin,
            seam=args.seam,
            replace=args.replace,
            memory=args.memory,
        )
    except Conflict as error:  # the server names the field of its API
        message = str(error).replace("replace=true", "--replace")
        raise Conflict(message.replace("memory=true", "--memory")) from None
    print(json.dumps(view, indent=2))
    return 0


def _text_of(file: str) -> str:
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text("utf-8")
    except UnicodeDecodeError as error:
        got = f"a byte that is not UTF-8 at offset {error.start}"
        raise BadRequest(f"kvedit: {_shown(file)}: expected UTF-8 text, got {got}") from None


def _ids_in(text: str, file: str) -> list[int]:
    """The list; the server judges its items. Raises BadRequest that names the file."""
    try:
        ids = json.loads(text)
    except (ValueError, RecursionError):
        ids = None
    if not isinstance(ids, list):
        start = json.dumps(text[:40])
        raise BadRequest(f"kvedit: {_shown(file)}: expected a JSON list of token ids, got {start}")
    return ids


def _shown(file: str) -> str:
    return "standard input" if file == "-" else file


def _list(args: argparse.Namespace) -> int:
    skills = connect(args).skills(namespace=namespace_of(args), everything=args.all)
    if args.json:
        print("\n".join(map(json.dumps, skills)))
        return 0
    print_table(_COLUMNS, skills)
    return 0


def _show(args: argparse.Namespace) -> int:
    print(json.dumps(connect(args).show(args.name, namespace=namespace_of(args)), indent=2))
    return 0


def _remove(args: argparse.Namespace) -> int:
    view = connect(args).remove(
        args.name, namespace=namespace_of(args), shared=args.shared, purge=args.purge
    )
    print(json.dumps(view, indent=2))
    return 0
