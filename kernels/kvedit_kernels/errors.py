"""KernelArgumentError: what an op raises for arguments that break its contract."""


class KernelArgumentError(ValueError):
    """A tensor or an int handed to an op breaks its contract; nothing was written."""

    def __init__(self, op: str, argument: str, expected: object, got: object) -> None:
        super().__init__(f"kvedit: {op}: {argument}: expected {expected}, got {got}")
        self.op, self.argument, self.expected, self.got = op, argument, expected, got


def require(ok: bool, op: str, argument: str, expected: object, got: object) -> None:
    """Raises KernelArgumentError unless ``ok``."""
    if not ok:
        raise KernelArgumentError(op, argument, expected, got)
