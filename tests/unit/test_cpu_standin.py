"""The sgl_kernel stand-in: when it is installed, what it answers, and that children get it.

Each case runs in an interpreter of its own, because it is about what the first import finds.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_patches.cpu.standin import find_real_package, has_cuda_device

REPO_ROOT = Path(__file__).resolve().parents[2]


def run(code: str, **env: str) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, "OMP_NUM_THREADS": "1", **env},
        cwd=REPO_ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def fake_package(folder: Path, body: str) -> str:
    """A folder for PYTHONPATH that holds a `sgl_kernel` whose import runs `body`."""
    package = folder / "sgl_kernel"
    package.mkdir()
    (package / "__init__.py").write_text(body)
    (package / "scalar_type.py").write_text("scalar_types = 'types'\n")
    return str(folder)


BROKEN = "from sgl_kernel import scalar_type\nraise ImportError('libcuda.so.1: no such file')"
INSTALL = "from sglang_patches.cpu.standin import install_if_needed; r = install_if_needed();"
# A host with a GPU never gets the stand-in; these cases take the driver away from the process.
NO_GPU = "import sglang_patches.cpu.standin as s; s.has_cuda_device = lambda: False;"


def test_a_broken_package_is_replaced_and_its_python_parts_still_import(tmp_path: Path) -> None:
    path = fake_package(tmp_path, BROKEN)
    code = (
        f"{NO_GPU}{INSTALL} import sgl_kernel; from sgl_kernel import scalar_types, rmsnorm;"
        "import sgl_kernel.scalar_type as t;"
        "print(r, scalar_types, t.scalar_types, sgl_kernel.__path__[0])"
    )
    assert run(code, PYTHONPATH=path) == f"libcuda.so.1: no such file types types {path}/sgl_kernel"


def test_kernels_refuse_when_called_not_when_imported(tmp_path: Path) -> None:
    code = (
        f"{NO_GPU}{INSTALL} from sgl_kernel import rmsnorm\n"
        "try: rmsnorm(1, x=2)\nexcept NotImplementedError as e: print(e)"
    )
    out = run(code, PYTHONPATH=fake_package(tmp_path, BROKEN))
    assert out == "kvedit: sgl_kernel.rmsnorm: expected a CUDA device, got a host without one"


@pytest.mark.parametrize(
    ("body", "before", "env"),
    [
        ("marker = 1", NO_GPU, {}),
        (BROKEN, "import sglang_patches.cpu.standin as s; s.has_cuda_device = lambda: True;", {}),
        (BROKEN, NO_GPU, {"SGLANG_USE_CPU_ENGINE": "0"}),
    ],
    ids=["package loads", "a GPU is present", "the user forbids the CPU engine"],
)
def test_otherwise_nothing_is_touched(
    tmp_path: Path, body: str, before: str, env: dict[str, str]
) -> None:
    code = (
        f"import sys;{before}path = list(sys.path);{INSTALL}"
        "kind = type(sys.modules.get('sgl_kernel')).__name__;print(r, kind, path == sys.path)"
    )
    out = run(code, PYTHONPATH=fake_package(tmp_path, body), **env)
    assert out in ("None module True", "None NoneType True")


def test_spawned_children_get_it_whatever_their_main_module(tmp_path: Path) -> None:
    """`python -c` gives children no main module to import: only sys.path reaches them."""
    code = (
        f"{NO_GPU}{INSTALL} import multiprocessing\n"
        "with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        """    print(pool.apply(eval, ("type(__import__('sgl_kernel')).__name__",)))"""
    )
    assert run(code, PYTHONPATH=fake_package(tmp_path, BROKEN)) == "StandIn"


def test_the_real_host_imports_sglang_after_prepare() -> None:
    """Negative control on a CPU host: without prepare the same import fails."""
    use = "import sglang.kernels.ops.kvcache.cache_move as c; print(bool(c))"
    assert find_real_package() is not None
    assert run(f"from sglang_patches.cpu import prepare; prepare(); {use}") == "True"
    if not has_cuda_device():
        with pytest.raises(AssertionError, match="sgl_kernel"):
            run(use, SGLANG_USE_CPU_ENGINE="1")
