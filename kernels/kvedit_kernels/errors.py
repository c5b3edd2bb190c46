"""KernelArgumentError: the one failure of this package that a caller can cause."""


class KernelArgumentError(ValueError):
    """A tensor or an int handed to an op breaks its contract; nothing was written."""

    def __init__(self, op: str, argument: str, expected: object, got: object) -> None:
        super().__init__(f"kvedit: {op}: {argument}: expected {expected}, got {got}")
        self.op, self.argument, self.expected, self.got = op, argument, expected, got


def require(ok: bool, op: str, argument: str, expected: object, got: object) -> None:
    if not ok:
        raise KernelArgumentError(op, argument, expected, got)
