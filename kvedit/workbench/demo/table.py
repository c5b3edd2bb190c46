"""The demo's rows as a text table for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from kvedit.workbench.demo.arms import FULL, Row

HEADINGS = (
    "layout",
    "arm",
    "tokens",
    "exact",
    "composed",
    "derived",
    "computed",
    "TTFT ms",
    "speed-up",
    "answer",
    "right",
    "= full",
)
TEXT_COLUMNS = (0, 1, 9, 10, 11)  # aligned left; the others are numbers


def cells_of(row: Row, full: Row) -> tuple[str, ...]:
    """One row's cells under HEADINGS; `full` is the full prefill of the same case."""
    return (
        row.layout,
        row.arm,
        str(row.prompt_tokens),
        str(row.exact),
        str(row.composed),
        str(row.derived),
        str(row.computed),
        f"{row.ttft_s * 1e3:.0f}",
        f"{full.ttft_s / row.ttft_s:.1f}x",
        row.answer,
        _yes(row.right),
        _yes(row.same_as_full),
    )


def by_case(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows grouped by case, in order."""
    groups: dict[int, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.case, []).append(row)
    return list(groups.values())


def full_of(group: Sequence[Row]) -> Row:
    """The full prefill among the rows of one case."""
    return next(row for row in group if row.arm == FULL)


def format_table(rows: Sequence[Row]) -> str:
    """The whole table, one block of lines per case under its question."""
    groups = by_case(rows)
    body = [[cells_of(row, full_of(group)) for row in group] for group in groups]
    lines = [HEADINGS, *(cells for block in body for cells in block)]
    widths = [max(len(cells[i]) for cells in lines) for i in range(len(HEADINGS))]
    output = [_line(HEADINGS, widths), "  ".join("-" * width for width in widths)]
    for group, block in zip(groups, body, strict=True):
        output.append(f"{group[0].case}. {group[0].question} ...")
        output += [_line(cells, widths) for cells in block]
    return "\n".join(output)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = (
        cell.ljust(width) if i in TEXT_COLUMNS else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join(padded).rstrip()


def _yes(value: bool) -> str:
    return "yes" if value else "no"
