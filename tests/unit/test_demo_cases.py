"""The demo's texts and questions: long enough, answerable, and shipped with the package."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from kvedit.workbench.demo.cases import CASES, SKILL_NAMES, Case, is_right, load_text, prompt_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.lead)
def test_the_answer_stands_in_a_document_of_the_layout(case: Case) -> None:
    documents = [load_text(name) for name in case.layout if name in SKILL_NAMES]
    assert sum(text.count(f"{case.lead} {case.expected}") for text in documents) == 1


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.lead)
def test_prompt_holds_every_text_unchanged_and_in_order(case: Case) -> None:
    prompt = prompt_of(case)
    places = [prompt.index(load_text(name)) for name in case.layout]
    assert places == sorted(places)
    assert prompt.endswith(case.lead)


def test_documents_are_asked_about_in_both_orders_and_behind_other_text() -> None:
    layouts = {case.layout for case in CASES}
    assert {SKILL_NAMES, SKILL_NAMES[::-1]} <= layouts
    assert any(layout[0] not in SKILL_NAMES for layout in layouts)
    assert {layout[0] for layout in layouts} >= set(SKILL_NAMES)


def test_right_means_the_fact_comes_first() -> None:
    case = Case(("policy",), "?", "The label is", "blue")
    assert is_right(case, " blue.\nThe")
    assert not is_right(case, " not blue.")
    assert not is_right(case, "")


def test_texts_are_declared_as_package_data() -> None:
    """An installed copy has no repository next to it, so setup.py must name the texts."""
    calls = [n for n in ast.walk(ast.parse((ROOT / "setup.py").read_text()))]
    declared = next(
        ast.literal_eval(node.value)
        for node in calls
        if isinstance(node, ast.keyword) and node.arg == "package_data"
    )
    data = ROOT / "kvedit" / "workbench" / "demo"
    shipped = {path for pattern in declared["kvedit.workbench.demo"] for path in data.glob(pattern)}
    assert {data / "data" / f"{name}.md" for name in (*SKILL_NAMES, "chat")} <= shipped
