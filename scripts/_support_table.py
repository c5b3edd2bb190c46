"""Write docs/support.md from the code that decides what is served, or compare it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sglang_patches import cpu

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "support.md"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 if out of date")
    args = parser.parse_args()
    cpu.prepare()
    from sglang_patches.pools.support import render  # imports sglang: only after `prepare`

    text = render()
    if not args.check:
        DOCUMENT.parent.mkdir(parents=True, exist_ok=True)
        DOCUMENT.write_text(text, encoding="utf-8")
        return 0
    if DOCUMENT.read_text(encoding="utf-8") == text:
        return 0
    print(f"kvedit: {DOCUMENT}: expected the output of scripts/support_table, got older text")
    return 1


if __name__ == "__main__":
    sys.exit(main())
