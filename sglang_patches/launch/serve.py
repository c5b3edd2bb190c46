"""`python -m sglang_patches.serve`: the SGLang server with kvedit, on GPU and CPU hosts.

The module body prepares the host before anything imports sglang. Spawned children import the
door, `sglang_patches.serve`, again as their main module, and with it this one: they are prepared
the same way.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from typing import NoReturn

from kvedit.config import Config
from kvedit.errors import BadRequest, Unsupported
from sglang_patches.cpu import prepare
from sglang_patches.cpu.defaults import gives_flag, with_cpu_defaults
from sglang_patches.launch.preflight import TRUST_FLAG, problems_of

IS_CPU_HOST = prepare()

STOCK_FLAG = "--stock"
CPU_PLUGIN = "kvedit_cpu"
KVEDIT_PLUGINS = ("kvedit", CPU_PLUGIN)
OWN_FLAGS = {
    "--kvedit-open": "KVEDIT_OPEN",
    "--kvedit-client-skills": "KVEDIT_CLIENT_SKILLS",
    "--kvedit-exact": "KVEDIT_EXACT",
}
# flags with a value; Config checks it
OWN_VALUES = {"--kvedit-report": "KVEDIT_REPORT", TRUST_FLAG: "KVEDIT_TRUST"}


def main(argv: Sequence[str] | None = None) -> None:
    """Run SGLang's launcher with kvedit's flags; returns when the server ends.

    Args:
        argv: server flags (default: the process's own). `--stock` starts SGLang without kvedit
            but with the same host adaptations.

    Raises:
        SystemExit: 2 when the flags are refused, one line per reason on stderr.
    """
    given = sys.argv[1:] if argv is None else argv
    problems = problems_of(given)
    if problems:
        refuse(problems)
    sys.argv = ["sglang.launch_server", *launcher_arguments(given)]
    try:
        Config.from_env()
    except BadRequest as error:
        refuse([str(error).removeprefix("kvedit: ")])
    try:
        runpy.run_module("sglang.launch_server", run_name="__main__")
    except Unsupported as refusal:
        refuse(refusal.reasons)


def refuse(reasons: Sequence[str]) -> NoReturn:
    """One line per reason on stderr, and SystemExit(2)."""
    for reason in reasons:
        print(f"kvedit: {reason}", file=sys.stderr)
    raise SystemExit(2) from None


def launcher_arguments(argv: Sequence[str]) -> list[str]:
    """The flags for SGLang's launcher; kvedit's own flags become environment variables."""
    arguments = take_own_flags(argv)
    if STOCK_FLAG in arguments:
        arguments.remove(STOCK_FLAG)
        arguments = with_counts(arguments)
        os.environ["SGLANG_PLUGINS"] = plugins_without_kvedit(os.environ.get("SGLANG_PLUGINS"))
    else:
        arguments = kvedit_arguments(arguments)
    return with_cpu_defaults(arguments) if IS_CPU_HOST else arguments


def take_own_flags(argv: Sequence[str]) -> list[str]:
    """`argv` without kvedit's flags; each sets its variable for all processes of the server."""
    rest: list[str] = []
    own = list(argv)
    while own:
        flag, is_joined, value = own.pop(0).partition("=")
        if flag in OWN_FLAGS and not is_joined:
            os.environ[OWN_FLAGS[flag]] = "1"
        elif flag in OWN_VALUES:
            os.environ[OWN_VALUES[flag]] = value if is_joined or not own else own.pop(0)
        else:
            rest.append(flag + is_joined + value)
    return rest


def kvedit_arguments(argv: Sequence[str]) -> list[str]:
    """`argv` with the flags kvedit needs, unless the user gave them."""
    result = list(argv)
    if not gives_flag(argv, "--radix-cache-backend"):
        result += ["--radix-cache-backend", "kvedit"]
    return with_counts(result)


def with_counts(argv: Sequence[str]) -> list[str]:
    """`argv` plus metrics, and cached tokens in every answer's usage."""
    wanted = ("--enable-metrics", "--enable-cache-report")
    return [*argv, *(flag for flag in wanted if not gives_flag(argv, flag))]


def plugins_without_kvedit(allowed: str | None) -> str:
    """Value of SGLANG_PLUGINS that keeps what the user allowed, without kvedit's own plugin.

    The CPU adaptation stays: both arms of a comparison must run the same attention.
    """
    others = installed_plugins() if not allowed else [n.strip() for n in allowed.split(",")]
    kept = [name for name in others if name and name not in KVEDIT_PLUGINS]
    return ",".join([*kept, CPU_PLUGIN])


def installed_plugins() -> list[str]:
    """Names of all general SGLang plugins that are installed."""
    from importlib.metadata import entry_points

    return [entry.name for entry in entry_points(group="sglang.srt.plugins")]


if __name__ == "__main__":
    main()
