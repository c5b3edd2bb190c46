"""One set of reasons: as documented, as pinned here, and nowhere spelled by hand."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from kvedit.reason import Reason
from kvedit.skills.segment import WHY_NOT_READY, State

REPO_ROOT = Path(__file__).resolve().parents[2]

# Clients match on these words: a renamed one breaks them.
OF_A_SKILL = """differs_at too_short seam_too_long not_worth_a_pass too_many_runs compiling evicted
    retired failed unknown_skill not_in_prompt no_slots overtaken window_lost internal_error"""
OF_A_FIELD = """role_not_found not_in_prompt value_empty value_too_long value_markup value_open
    tokens_merge overlapping anchor_not_found other_anchor behind_anchor"""
OF_A_CONVERSATION = "no_field strategy not_proven no_base no_saving"
NOT_LOOKED_FOR = "exact off"
OF_A_REQUEST = """exact session input_embeds positional_embed_overrides token_type_ids multimodal
    multi_item token_indices_to_pool routed_experts indexer_topk hidden_states adapter
    no_cache_insert beam"""
PINNED = {
    word
    for group in (OF_A_SKILL, OF_A_FIELD, OF_A_CONVERSATION, NOT_LOOKED_FOR, OF_A_REQUEST)
    for word in group.split()
}
WORDS = {reason.value for reason in Reason}


def test_the_words_are_the_api() -> None:
    assert WORDS == PINNED
    assert all(reason.name == reason.value.upper() for reason in Reason)


# ---- documents


def documented(path: str, start: str, stop: str) -> set[str]:
    """Code words of a passage, without those in brackets."""
    text = (REPO_ROOT / path).read_text("utf-8")
    assert start in text, start
    passage = text.partition(start)[2].partition(stop)[0]
    return set(re.findall(r"`(\w+)`", re.sub(r"\([^()]*\)", "", passage)))


def test_readme_names_what_a_skill_is_refused_for() -> None:
    found = documented("README.md", "`refused` names a skill and a reason:", "or a feature of")
    assert found == {*OF_A_SKILL.split(), "exact"}


def test_readme_names_features_that_rule_splices_out() -> None:
    text = (REPO_ROOT / "README.md").read_text("utf-8")
    examples = text.partition("a feature of the request that rules splices out (")[2].split(")")[0]
    assert set(re.findall(r"`(\w+)`", examples)) < set(OF_A_REQUEST.split())


def test_readme_names_why_a_field_takes_no_part() -> None:
    found = documented("README.md", "`unedited` names fields and reasons:", ". Spans")
    assert found == set(OF_A_FIELD.split())


def test_readme_names_why_a_prompt_is_served_as_sent() -> None:
    found = documented("README.md", "`as_sent_because` is", "It never depends")
    assert found == {*OF_A_CONVERSATION.split(), *NOT_LOOKED_FOR.split()}


def test_the_table_of_docs_security_is_whole() -> None:
    table = (REPO_ROOT / "docs/security.md").read_text("utf-8").partition("| reason | when |")[2]
    rows = table.partition("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", rows, re.M)) == set(OF_A_CONVERSATION.split())


# ---- how a member is written


@pytest.mark.parametrize("reason", Reason)
def test_a_reason_is_its_word_wherever_it_is_written(reason: Reason) -> None:
    word = reason.value
    assert [str(reason), f"{reason}", "%s" % reason, "".join([reason])] == [word] * 4  # noqa: UP031
    assert json.dumps([reason]) == json.dumps([word]) == orjson.dumps([reason]).decode()
    assert type(str(reason)) is str
    assert {reason: 1}[word] == 1 and reason == word


def test_each_state_but_ready_is_a_reason() -> None:
    assert set(WHY_NOT_READY) == set(State) - {State.READY}
    assert all(state.value == reason.value for state, reason in WHY_NOT_READY.items())


# ---- nobody spells one by hand


def by_hand(source: str) -> Iterator[str]:
    """Words of a reason in ``source`` that stand for one: whatever cannot be another word, and
    what is given or compared as a reason."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and "_" in str(node.value):
            yield from {node.value} & WORDS
        elif isinstance(node, ast.keyword) and node.arg == "reason":
            yield from constants(node.value)
        elif isinstance(node, ast.Compare) and "reason" in ast.unparse(node.left):
            yield from (word for other in node.comparators for word in constants(other))


def constants(node: ast.expr) -> set[str]:
    return {c.value for c in ast.walk(node) if isinstance(c, ast.Constant)} & WORDS


def test_no_reason_is_spelled_by_hand() -> None:
    found = [
        f"{path.relative_to(REPO_ROOT)}: {word}"
        for package in ("kvedit", "sglang_patches")
        for path in sorted((REPO_ROOT / package).rglob("*.py"))
        if path != REPO_ROOT / "kvedit" / "reason.py"
        for word in by_hand(path.read_text("utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "return 'not_proven'",
        "Refusal(skill='a', reason='evicted')",
        "Refusal(skill='a', reason='retired' if gone else other)",
        "refusal.reason == 'evicted'",
        "item.reason in ('beam', 'exact')",
    ],
)
def test_the_check_sees_what_it_should(source: str) -> None:
    assert list(by_hand(source))
