"""Views as a table: one line each, columns as wide as their widest cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def print_table(columns: Sequence[str], views: Sequence[Mapping[str, Any]]) -> None:
    """Print the keys ``columns`` of each view, left-aligned under a row of headings."""
    rows = [tuple(columns), *(tuple(str(view[column]) for column in columns) for view in views)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())
