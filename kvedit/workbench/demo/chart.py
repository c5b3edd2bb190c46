"""The demo's chart: time to first token, one bar per arm and case, as inline SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from kvedit.workbench.demo.arms import ARMS, Row
from kvedit.workbench.demo.table import by_case

WIDTH = 860
LABEL_WIDTH = 210
VALUE_WIDTH = 80
BAR_HEIGHT = 14
BAR_GAP = 3
CASE_GAP = 16
LEGEND_HEIGHT = 34
AXIS_HEIGHT = 40
NUM_TICKS = 4


def ttft_chart(rows: Sequence[Row]) -> str:
    """An `<svg>` element. Colours come from the page's classes, so both themes are legible."""
    groups = by_case(rows)
    case_height = len(ARMS) * (BAR_HEIGHT + BAR_GAP) + CASE_GAP
    plot_bottom = LEGEND_HEIGHT + len(groups) * case_height
    step_ms = tick_step_ms(max(row.ttft_s for row in rows) * 1e3)
    px_per_ms = (WIDTH - LABEL_WIDTH - VALUE_WIDTH) / (step_ms * NUM_TICKS)
    parts = [*_legend(), *_grid(step_ms, px_per_ms, plot_bottom)]
    for i, group in enumerate(groups):
        parts += _case(group, LEGEND_HEIGHT + i * case_height, px_per_ms)
    height = plot_bottom + AXIS_HEIGHT
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="Time to first token of every case, per arm">{"".join(parts)}</svg>'
    )


def tick_step_ms(highest_ms: float) -> float:
    """The smallest of 1, 2, 2.5 or 5 times a power of ten whose NUM_TICKS steps hold the value."""
    power = 1.0
    while True:
        for factor in (1, 2, 2.5, 5):
            if factor * power * NUM_TICKS >= highest_ms:
                return factor * power
        power *= 10


def _legend() -> list[str]:
    parts = []
    for i, arm in enumerate(ARMS):
        x = LABEL_WIDTH + i * 130
        parts.append(f'<rect class="bar{i}" x="{x}" y="6" width="12" height="12" rx="2"/>')
        parts.append(_text(x + 18, 17, arm))
    return parts


def _grid(step_ms: float, px_per_ms: float, bottom: float) -> list[str]:
    parts = []
    for tick in range(NUM_TICKS + 1):
        x = LABEL_WIDTH + tick * step_ms * px_per_ms
        parts.append(
            f'<line class="grid" x1="{x:.1f}" y1="{LEGEND_HEIGHT - 6}" x2="{x:.1f}" y2="{bottom}"/>'
        )
        parts.append(_text(x, bottom + 14, f"{tick * step_ms:g}", anchor="middle"))
    middle = LABEL_WIDTH + NUM_TICKS / 2 * step_ms * px_per_ms
    parts.append(_text(middle, bottom + 32, "time to first token, ms", anchor="middle"))
    return parts


def _case(group: Sequence[Row], top: float, px_per_ms: float) -> list[str]:
    case = group[0]
    parts = [
        _text(0, top + 14, f"{case.case}. {case.layout}"),
        _text(0, top + 32, f"{case.prompt_tokens} tokens", css="muted"),
    ]
    for row in group:
        arm = ARMS.index(row.arm)
        y = top + arm * (BAR_HEIGHT + BAR_GAP)
        width = max(1.0, row.ttft_s * 1e3 * px_per_ms)
        parts.append(
            f'<rect class="bar{arm}" x="{LABEL_WIDTH}" y="{y}" width="{width:.1f}" '
            f'height="{BAR_HEIGHT}" rx="2"/>'
        )
        parts.append(_text(LABEL_WIDTH + width + 6, y + 12, f"{row.ttft_s * 1e3:.0f}"))
    return parts


def _text(x: float, y: float, content: str, *, anchor: str = "start", css: str = "label") -> str:
    return (
        f'<text class="{css}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">'
        f"{escape(content)}</text>"
    )
