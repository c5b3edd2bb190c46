"""Entry point of `python -m kvedit.workbench.demo`."""

from kvedit.workbench.demo.program import main

if __name__ == "__main__":
    raise SystemExit(main())
