"""What a host without a GPU needs so that the real SGLang server runs on it.

Import this package and call `prepare()` before the first import of sglang. Nothing here imports
sglang at module level.

Called by: the launcher, the plugin `kvedit_cpu`, tests.
May touch: the host's kernels and layers, on a host without a GPU and nowhere else.
"""

from __future__ import annotations

import os

from sglang_patches.cpu.standin import has_cuda_device, install_if_needed

ADAPT_ENV = "KVEDIT_CPU_ADAPT"


def prepare() -> bool:
    """Make `import sglang` work in this process and in every process it spawns.

    Call it at module level of the program that uses `sglang.Engine`, before importing sglang.
    Values the user already set in the environment are kept.

    Returns:
        True when this is a CPU host and the adaptations are on, False on a GPU host (nothing done).
    """
    if has_cuda_device():
        return False
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    install_if_needed()
    return True


ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    ADAPT_ENV: "1",
}
"""Environment of a CPU host; each name is listed with its reason in `adaptations`."""
