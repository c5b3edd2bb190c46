"""Found in front of the real package by spawned processes of a CPU host; becomes the stand-in."""

import sys

from sglang_patches.cpu import standin

_real_dir = standin.find_real_package()
if _real_dir is None:
    raise ModuleNotFoundError("kvedit: sgl_kernel: expected it installed, got no such package")
sys.modules[__name__] = standin.build(_real_dir, "inherited from the parent process")
