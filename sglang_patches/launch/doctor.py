"""`python -m sglang_patches.launch.doctor [server flags]`: the report behind `kvedit doctor`."""

from __future__ import annotations

import contextlib
import io
import os
import platform
import sys
import warnings
from collections.abc import Iterator, Sequence
from importlib.metadata import entry_points, version

from sglang_patches.cpu import ENVIRONMENT, prepare
from sglang_patches.cpu.adaptations import ADAPTATIONS
from sglang_patches.cpu.standin import why_real_package_fails
from sglang_patches.launch.preflight import model_problems, value_of
from sglang_patches.launch.serve import IS_CPU_HOST, launcher_arguments

KEY_WARNING = (
    "SGLang's own GET /server_info prints the API key and the admin key to anyone who holds "
    "either; whoever may call it is an administrator. Block the route in front of the server."
)


def report_host() -> Iterator[str]:
    """Versions, device and how the compiled parts are doing."""
    from kvedit_kernels import cpu_kernel_status
    from sglang_patches.host.refusals import HOST_VERSION

    installed = version("sglang")
    verdict = "supported" if installed == HOST_VERSION else f"NOT SUPPORTED, needs {HOST_VERSION}"
    yield f"kvedit {version('kvedit')}, Python {platform.python_version()}"
    yield f"sglang {installed}: {verdict}"
    yield "device: CPU, no CUDA device found" if IS_CPU_HOST else "device: CUDA"
    yield f"CPU relocation kernel: {cpu_kernel_status()}"


def report_plugins() -> Iterator[str]:
    """Plugins SGLang will load, and whether ours are among them."""
    found = {entry.name: entry.value for entry in entry_points(group="sglang.srt.plugins")}
    allowed = os.environ.get("SGLANG_PLUGINS")
    for name, value in sorted(found.items()):
        masked = allowed is not None and name not in allowed.split(",")
        yield f"plugin {name} = {value}" + (" (masked by SGLANG_PLUGINS)" if masked else "")
    for name in ("kvedit", "kvedit_cpu"):
        if name not in found:
            yield f"plugin {name}: MISSING, install kvedit again"


def report_adaptations() -> Iterator[str]:
    """What a CPU host gets, each with its reason and the day it can go."""
    if not IS_CPU_HOST:
        yield "none: this host has a GPU, the server runs as SGLang ships it"
        return
    yield "environment: " + " ".join(f"{name}={os.environ[name]}" for name in ENVIRONMENT)
    for adaptation in ADAPTATIONS:
        yield adaptation.name
        yield f"    why: {adaptation.reason}"
        yield f"    delete when: {adaptation.delete_when}"


def report_events() -> Iterator[str]:
    """Optional parts that a server would go without."""
    from kvedit.config import Config
    from sglang_patches.scheduler.telemetry.events import open_publisher

    run_dir = Config.from_env().home / "run"
    publisher, problem = open_publisher(run_dir)
    if publisher is not None:
        publisher.close()
    if problem is not None:
        yield f"{problem} ({run_dir})"


def refusals_for(flags: Sequence[str]) -> list[str]:
    """Why `kvedit serve FLAGS` would be refused; empty when it would start.

    Without `--model-path` the flags are judged as given, before SGLang resolves them.
    """
    has_model = value_of(flags, "--model-path") is not None
    problems = model_problems(flags) if has_model else []
    if problems:
        return problems
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SGLang's, about hardware that this host does not have
        return _judged_by_host(flags, has_model=has_model)


def _judged_by_host(flags: Sequence[str], *, has_model: bool) -> list[str]:
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    from kvedit.errors import Unsupported
    from sglang_patches.host.refusals import refusals

    load_plugins()
    given = [*flags] if has_model else [*flags, "--model-path", "none"]
    usage = io.StringIO()
    try:
        with contextlib.redirect_stderr(usage):  # its log follows: the handler keeps this stream
            server_args = prepare_server_args(launcher_arguments(given))
    except SystemExit as stopped:
        if not stopped.code:  # --help
            raise
        return [f"SGLang itself: {last_line(usage.getvalue())}"]
    if has_model:
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                server_args.resolve_once()
        except Unsupported as refusal:
            return list(refusal.reasons)
        except (ValueError, OSError, AssertionError) as error:
            return [f"SGLang itself: {error}"]
    return refusals(server_args)


def last_line(usage: str) -> str:
    """What argparse says behind its usage, without the name of the program."""
    return usage.rstrip().rpartition("\n")[2].rpartition(": error: ")[2]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report. Returns 1 when plugins, version or flags would stop the server."""
    flags = list(sys.argv[1:] if argv is None else argv)
    stock_reason = None if IS_CPU_HOST else why_real_package_fails()
    sections = {
        "host": list(report_host()),
        "plugins": list(report_plugins()),
        "adaptations of a host without a GPU": list(report_adaptations()),
        "warnings": [KEY_WARNING, *report_events()],
    }
    if stock_reason is not None:
        sections["warnings"].append(f"sgl_kernel does not load on this GPU host: {stock_reason}")
    installed = [*sections["host"], *sections["plugins"]]
    problems = [line for line in installed if "MISSING" in line or "NOT SUPPORTED" in line]
    if flags:
        reasons = refusals_for(flags)
        problems += reasons
        sections["flags: " + " ".join(flags)] = reasons or ["accepted"]
    for title, lines in sections.items():
        print(f"{title}\n" + "\n".join("  " + line for line in lines) + "\n")
    print(verdict(problems))
    return 1 if problems else 0


def verdict(problems: Sequence[str]) -> str:
    """The last line of the report, which repeats a problem that stands alone."""
    if not problems:
        return "ok"
    return f"1 problem: {problems[0]}" if len(problems) == 1 else f"{len(problems)} problems"


if __name__ == "__main__":
    prepare()
    sys.exit(main())
