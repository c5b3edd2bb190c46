"""kvedit doctor"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

REPORT_MODULE = "sglang_patches.launch.doctor"


def add_parser(subparsers: Any) -> None:
    """Add ``doctor``; the report itself needs the host and runs in the room that knows it."""
    parser = subparsers.add_parser(
        "doctor",
        help="what this host gets and why; with server flags: what would be refused",
        usage="kvedit doctor [-- any flag of kvedit serve]",
        description="Report on this installation; exit status 1 when something would not work.",
        allow_abbrev=False,
    )
    parser.set_defaults(func=_doctor, takes_server_flags=True)


def _doctor(args: argparse.Namespace) -> int:
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", REPORT_MODULE, *args.server_flags])
