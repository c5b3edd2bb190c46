"""Table, chart and page are made of the rows alone; void comparisons are named."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from kvedit.workbench.demo.arms import FULL, REPEAT, SPLICE, Row, first_line, problems_of, row_of
from kvedit.workbench.demo.cases import Case
from kvedit.workbench.demo.chart import LABEL_WIDTH, NUM_TICKS, tick_step_ms, ttft_chart
from kvedit.workbench.demo.program import main, summary
from kvedit.workbench.demo.report import html_table, render_report
from kvedit.workbench.demo.table import HEADINGS, by_case, cells_of, format_table, full_of
from kvedit.workbench.timed_request import Streamed

BASE = Row(
    case=1,
    layout="chat + policy",
    question="Where? At <gate>",
    arm=FULL,
    prompt_tokens=2000,
    exact=0,
    composed=0,
    derived=0,
    computed=2000,
    copied=0,
    ttft_s=4.0,
    answer="17.",
    right=True,
    same_as_full=True,
)
ROWS = [
    BASE,
    replace(BASE, arm=SPLICE, composed=1500, computed=500, copied=1500, ttft_s=1.0),
    replace(BASE, arm=REPEAT, composed=1500, derived=499, computed=1, ttft_s=0.5),
]


def test_cells_show_classes_and_the_ratio_to_the_full_prefill_of_the_case() -> None:
    cells = dict(zip(HEADINGS, cells_of(ROWS[1], full_of(ROWS)), strict=True))
    assert (cells["composed"], cells["computed"], cells["TTFT ms"]) == ("1500", "500", "1000")
    assert cells["speed-up"] == "4.0x"


def test_every_row_stands_in_table_and_page_and_text_is_escaped() -> None:
    other = [replace(row, case=2, layout="tools", answer="no & idea") for row in ROWS]
    rows = [*ROWS, *other]
    assert [len(group) for group in by_case(rows)] == [3, 3]
    assert len(format_table(rows).splitlines()) == 2 + 2 + len(rows)
    table = ET.fromstring(html_table(rows))
    assert len(table.findall("tbody/tr/td")) == len(rows) * len(HEADINGS)
    assert "no &amp; idea" in html_table(rows) and "<gate>" not in html_table(rows)


def test_page_is_self_contained_and_shows_problems() -> None:
    page = render_report(ROWS, {"Model": "m"}, ["kvedit: splice arm: expected, got none"])
    assert not re.search(r"(?:src|href)\s*=|url\(|@import|<script", page)
    assert "got none" in page and "prefers-color-scheme: dark" in page


def test_bar_widths_are_proportional_to_the_times() -> None:
    chart = ET.fromstring(ttft_chart(ROWS))
    bars = [r for r in chart.iter("rect") if float(r.get("x", "0")) == LABEL_WIDTH]
    widths = [float(bar.get("width", "0")) for bar in bars if float(bar.get("y", "0")) > 30]
    assert len(widths) == 3
    assert widths[0] / widths[1] == pytest.approx(4.0, rel=0.01)
    assert widths[1] / widths[2] == pytest.approx(2.0, rel=0.01)


@pytest.mark.parametrize("highest_ms", [0.4, 3, 99, 100, 101, 2600, 40000])
def test_axis_holds_the_highest_value_without_waste(highest_ms: float) -> None:
    axis = tick_step_ms(highest_ms) * NUM_TICKS
    assert axis >= highest_ms
    assert axis <= max(2.0 * 2.5 * highest_ms, NUM_TICKS)


def test_void_comparisons_are_named() -> None:
    assert problems_of(ROWS) == []
    nothing_spliced = [BASE, replace(ROWS[1], composed=0, computed=2000)]
    assert "composed tokens, got none" in problems_of(nothing_spliced)[0]
    cached_baseline = [replace(BASE, exact=1500, computed=500), *ROWS[1:]]
    assert "every token computed, got 500" in problems_of(cached_baseline)[0]
    lost_tokens = [BASE, replace(ROWS[1], computed=499), ROWS[2]]
    assert "expected 2000 classed tokens, got 1999" in problems_of(lost_tokens)[0]


def test_rows_carry_what_was_generated_and_reported() -> None:
    report = {"exact": 3, "composed": 4, "derived": 5, "computed": 6, "copied": 4}
    meta = {"prompt_tokens": 18, "kvedit": [report]}
    full = Streamed(1.0, 2.0, " blue.\nThe label", [1], meta)
    other = Streamed(0.5, 2.0, " green.\nThe label", [2], meta)
    case = Case(("policy",), "Colour?", "It is", "blue")
    row = row_of(7, case, SPLICE, other, full)
    assert (row.exact, row.composed, row.derived, row.computed) == (3, 4, 5, 6)
    assert (row.answer, row.right, row.same_as_full) == ("green.", False, False)
    assert row_of(7, case, FULL, full, full).right
    assert "0 with splices" in summary([row_of(7, case, FULL, full, full), row])


def test_first_line_of_nothing_is_empty() -> None:
    assert first_line(" \n ") == ""


def test_missing_model_fails_with_its_own_status(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVEDIT_HOME", str(tmp_path))
    assert main(["--out", f"{tmp_path}/out"]) == 2
    assert "scripts/fetch_model" in capsys.readouterr().err
