"""`python -m sglang_patches.serve`: the door of `launch.serve`, under the name users know."""

from __future__ import annotations

from sglang_patches.launch.serve import main

if __name__ == "__main__":
    main()
