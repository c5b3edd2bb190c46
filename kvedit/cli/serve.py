"""kvedit serve"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from kvedit.config import TRUSTS

SERVER_MODULE = "sglang_patches.serve"

DESCRIPTION = """\
Start the SGLang server with kvedit. Every flag of SGLang is accepted and passed on; a flag you
give always wins over a default. `kvedit doctor` lists what is added on a host without a GPU.
For the flags of SGLang itself: python -m sglang_patches.serve --help
"""


def add_parser(subparsers: Any) -> None:
    """Add ``serve``; its flags are the server's own and are not looked at here."""
    parser = subparsers.add_parser(
        "serve",
        help="start the SGLang server with kvedit",
        description=DESCRIPTION,
        usage="kvedit serve --model-path DIR [--stock] [any SGLang flag]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    # The server parses these; they stand here so that --help shows them.
    parser.add_argument("--model-path", metavar="DIR", help="Hugging Face folder of the model")
    parser.add_argument(
        "--stock", action="store_true", help="SGLang without kvedit, with the same host defaults"
    )
    parser.add_argument(
        "--kvedit-open", action="store_true", help="admin routes for everyone, although no key"
    )
    parser.add_argument(
        "--kvedit-client-skills",
        action="store_true",
        help="ordinary clients may register skills in the namespace of their own cache salt",
    )
    parser.add_argument(
        "--kvedit-exact",
        action="store_true",
        help="exact KV of the prompt as sent for every request (evaluation, RL)",
    )
    parser.add_argument(
        "--kvedit-report",
        choices=("on", "off"),
        help="off: answers carry no report, GET /kvedit/requests/{id} still has it",
    )
    parser.add_argument(
        "--kvedit-trust",
        choices=TRUSTS,
        help="what proves that an earlier turn is the caller's: tokens (default), replies too "
        "(a single user), or names too (a gateway sets them)",
    )
    parser.set_defaults(func=_serve, takes_server_flags=True)


def _serve(args: argparse.Namespace) -> int:
    flags = list(args.server_flags)
    if args.model_path is not None:
        flags += ["--model-path", args.model_path]
    for name in ("stock", "kvedit_open", "kvedit_client_skills", "kvedit_exact"):
        if getattr(args, name):
            flags.append("--" + name.replace("_", "-"))
    if args.kvedit_report is not None:
        flags += ["--kvedit-report", args.kvedit_report]
    if args.kvedit_trust is not None:
        flags += ["--kvedit-trust", args.kvedit_trust]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", SERVER_MODULE, *flags])
