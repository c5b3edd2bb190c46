"""The console command `kvedit`: finds the subcommand, turns errors into one line and a status."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from kvedit import __version__
from kvedit.errors import BadRequest, KvEditError

COMMANDS = ("serve", "skills", "fields", "status", "doctor", "events")
OK, FAILED, BAD_INPUT = 0, 1, 2


def build_parser() -> argparse.ArgumentParser:
    """The parser; every module `kvedit.cli.<command>` adds its own part and sets ``func``."""
    parser = argparse.ArgumentParser(
        prog="kvedit",
        description="Text compiled once, spliced into any prompt of an SGLang server.",
    )
    parser.add_argument("--version", action="version", version=f"kvedit {__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for name in COMMANDS:
        import_module(f"kvedit.cli.{name}").add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0, 1 when the server or host refuses, 2 on bad input."""
    args, rest = build_parser().parse_known_args(argv)
    takes_flags = getattr(args, "takes_server_flags", False)
    if rest and not takes_flags:
        return _fail(f"kvedit: arguments: expected no {' '.join(rest)}", BAD_INPUT)
    if takes_flags:
        args.server_flags = [flag for flag in rest if flag != "--"]
    try:
        status: int = args.func(args)
    except BadRequest as error:
        return _fail(str(error), BAD_INPUT)
    except KvEditError as error:
        return _fail(str(error), FAILED)
    except ValueError as error:  # an argument that is no JSON, no UTF-8, no URL
        return _fail(f"kvedit: {error}", BAD_INPUT)
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        return _fail(f"kvedit: {error.filename}: {error.strerror}", BAD_INPUT)
    except OSError as error:
        return _fail(f"kvedit: {error}", FAILED)
    return status


def _fail(message: str, status: int) -> int:
    print(" ".join(message.split()), file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
