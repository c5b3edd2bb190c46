"""The demo's HTML report: one file, no external resource, legible in light and dark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from kvedit.workbench.demo.arms import Row
from kvedit.workbench.demo.chart import ttft_chart
from kvedit.workbench.demo.table import HEADINGS, TEXT_COLUMNS, by_case, cells_of, full_of

STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --ink: #1c2128; --muted: #57606a;
  --line: #d0d7de; --band: #f3f5f8; --bar0: #8c959f; --bar1: #0969da; --bar2: #1a7f5a; }
@media (prefers-color-scheme: dark) { :root { --page: #11151b; --ink: #e3e8ee; --muted: #9aa5b1;
  --line: #333b45; --band: #1a2028; --bar0: #7d8791; --bar1: #58a6ff; --bar2: #3fbf8f; } }
body { background: var(--page); color: var(--ink); margin: 2rem auto; max-width: 72rem;
  padding: 0 1rem; font: 15px/1.5 system-ui, sans-serif; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13.5px; }
th, td { padding: .25rem .6rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
th.text, td.text { text-align: left; }
th.question { text-align: left; background: var(--band); font-weight: 600; }
.muted { color: var(--muted); fill: var(--muted); }
.no { font-weight: 700; }
svg { width: 100%; height: auto; font: 13px system-ui, sans-serif; }
svg .label { fill: var(--ink); } svg .grid { stroke: var(--line); }
.bar0 { fill: var(--bar0); } .bar1 { fill: var(--bar1); } .bar2 { fill: var(--bar2); }
"""

EXPLANATION = (
    "Every question was asked three times on one server. <b>full prefill</b>: splicing switched "
    "off and a cache salt of its own, so the server prefills the whole prompt as stock SGLang "
    "does. <b>splice</b>: a fresh salt, nothing cached but the documents that were compiled once. "
    "<b>repeat</b>: the spliced prompt once more under the same salt. TTFT is the time from "
    "sending the request to the first streamed token. <i>exact</i>, <i>composed</i> and "
    "<i>derived</i> tokens came from the cache (as a plain prefix, from a compiled document, and "
    "behind one), <i>computed</i> tokens were forwarded. The answers are what the model "
    "generated: <i>right</i> compares with the document, <i>= full</i> with the full prefill."
)


def render_report(rows: Sequence[Row], facts: Mapping[str, str], problems: Sequence[str]) -> str:
    """The whole page. `facts`: label to value, shown above the chart."""
    listed = "".join(f"<li>{escape(key)}: {escape(value)}</li>" for key, value in facts.items())
    warnings = "".join(f'<p class="no">{escape(problem)}</p>' for problem in problems)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>kvedit demo</title><style>{STYLE}</style></head><body>"
        f"<h1>kvedit demo</h1>{warnings}<p>{EXPLANATION}</p><ul>{listed}</ul>"
        f"<h2>Time to first token</h2>{ttft_chart(rows)}"
        f'<h2>All requests</h2><div class="scroll">{html_table(rows)}</div></body></html>\n'
    )


def html_table(rows: Sequence[Row]) -> str:
    """The same cells as the terminal's table, as a `<table>` element."""
    parts = ["<table><thead>", _row(HEADINGS, "th"), "</thead>"]
    for group in by_case(rows):
        question = escape(f"{group[0].case}. {group[0].question} \u2026")
        parts.append(
            f'<tbody><tr><th class="question" colspan="{len(HEADINGS)}">{question}</th></tr>'
        )
        parts += [_row(cells_of(row, full_of(group)), "td") for row in group]
        parts.append("</tbody>")
    return "".join([*parts, "</table>"])


def _row(cells: Sequence[str], tag: str) -> str:
    return f"<tr>{''.join(_cell(tag, i, cell) for i, cell in enumerate(cells))}</tr>"


def _cell(tag: str, column: int, content: str) -> str:
    names = (["text"] if column in TEXT_COLUMNS else []) + (["no"] if content == "no" else [])
    css = f' class="{" ".join(names)}"' if names else ""
    return f"<{tag}{css}>{escape(content)}</{tag}>"
