"""Entry point of `python -m kvedit.demo`."""

from kvedit.demo.program import main

if __name__ == "__main__":
    raise SystemExit(main())
