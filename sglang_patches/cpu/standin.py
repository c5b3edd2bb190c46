"""A stand-in for `sgl_kernel` where the real package cannot load.

SGLang's CPU path imports `sgl_kernel` for its pure-Python parts (scalar types), but the package
loads CUDA libraries at import and fails without a driver. The stand-in keeps the real package's
directory as its `__path__`, so pure-Python submodules import from there; every other name is a
function that raises NotImplementedError when it is called.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

PACKAGE = "sgl_kernel"
SHADOW_DIR = str(Path(__file__).parent / "shadow")


def install_if_needed() -> str | None:
    """Put the stand-in into `sys.modules` when the real package cannot load on a CPU host.

    Spawned processes inherit `sys.path`; a shadow directory in front of it gives them the same
    stand-in even where their main module never calls this function.

    Returns:
        Why the real package cannot load, or None when it can, when a CUDA device is present, when
        the user forbids the CPU engine (`SGLANG_USE_CPU_ENGINE=0`) or when it was never installed.
    """
    if isinstance(sys.modules.get(PACKAGE), StandIn):
        reason: str | None = sys.modules[PACKAGE].reason
        return reason
    if has_cuda_device() or os.environ.get("SGLANG_USE_CPU_ENGINE", "1") != "1":
        return None
    real_dir = find_real_package()
    reason = why_real_package_fails()
    if real_dir is None or reason is None:
        return None
    sys.modules[PACKAGE] = build(real_dir, reason)
    if SHADOW_DIR not in sys.path:
        sys.path.insert(0, SHADOW_DIR)
    return reason


def has_cuda_device() -> bool:
    """Whether a CUDA driver is loadable and shows at least one device to this process."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    initialised = driver.cuInit(0) == 0
    return initialised and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def find_real_package() -> Path | None:
    """Directory of the installed `sgl_kernel`, without importing it; None if not installed."""
    search_path = [entry for entry in sys.path if entry != SHADOW_DIR]
    spec = importlib.machinery.PathFinder.find_spec(PACKAGE, search_path)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def why_real_package_fails() -> str | None:
    """Import the real package; None when it loads, else the last line of its error.

    A failed import leaves submodules behind; they are removed so that the stand-in starts clean.
    """
    try:
        importlib.import_module(PACKAGE)
    except (ImportError, OSError, RuntimeError) as error:
        forget_package()
        lines = [line.strip("- ") for line in str(error).splitlines() if line.strip()]
        causes = [line for line in lines if ".so" in line]
        return (causes or lines or [type(error).__name__])[0]
    return None


def forget_package() -> None:
    """Drop the package and all its submodules from `sys.modules`."""
    for name in [n for n in sys.modules if n == PACKAGE or n.startswith(PACKAGE + ".")]:
        del sys.modules[name]


class StandIn(ModuleType):
    """The module object; unknown names become functions that refuse to run."""

    reason: str

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "scalar_types":
            return importlib.import_module(PACKAGE + ".scalar_type").scalar_types
        return _refusing_function(name)


def build(real_dir: Path, reason: str) -> StandIn:
    """A stand-in over `real_dir`; `reason` says why the real package is not used."""
    module = StandIn(PACKAGE, "kvedit stand-in: the CUDA kernels of sgl_kernel cannot load here")
    module.__path__ = [str(real_dir)]
    module.__spec__ = ModuleSpec(PACKAGE, loader=None, origin=str(real_dir), is_package=True)
    module.__spec__.submodule_search_locations = [str(real_dir)]
    module.reason = reason
    return module


def _refusing_function(name: str) -> Any:
    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"kvedit: sgl_kernel.{name}: expected a CUDA device, got a host without one"
        )

    refuse.__name__ = name
    return refuse
