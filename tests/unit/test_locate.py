"""Values found in token ids, and the ids of another value in the same place."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvedit.edit.locate import MAX_VALUE_TOKENS, Located, locate
from kvedit.edit.window import window_ids
from kvedit.fields.declaration import Where
from kvedit.text.chat_probe import derive_chat_form
from kvedit.text.tokens import TokenText
from tests.unit.chat_tokenizers import (
    add_form,
    chat,
    llama3_like,
    render_with,
    sentencepiece_like,
    with_form,
)


def a_field(pattern="order_status: {value}", **where):
    prefix, _, suffix = pattern.partition("{value}")
    return SimpleNamespace(prefix=prefix, suffix=suffix, where=Where(**where))


WITHIN = {"role": None, "within": 40}


class Case:
    def __init__(self, tokenizer):
        self.tokens = TokenText(tokenizer)
        self.render = render_with(tokenizer)
        self.form = derive_chat_form(self.render, self.tokens)

    def ids(self, *pairs):
        return array("q", self.render(chat(*pairs), True))

    def locate(self, ids, field=None):
        return locate(field or a_field(), ids, self.form, self.tokens)

    def text(self, ids):
        return self.tokens.joined(ids)[0].decode()


MAKERS = {
    "chatml": lambda folder: with_form(folder, "chatml"),
    "llama3": lambda folder: with_form(folder, "llama3"),
    "llama3 merges": lambda folder: add_form(llama3_like(), "llama3"),
    "mistral": lambda folder: add_form(sentencepiece_like(prepend=False), "mistral"),
    "mistral prepending": lambda folder: add_form(sentencepiece_like(prepend=True), "mistral"),
}


@pytest.fixture(scope="module")
def cases(default_model_dir):
    made = {}

    def case(name):
        if name not in made:
            made[name] = Case(MAKERS[name](default_model_dir))
        return made[name]

    return case


@pytest.fixture(scope="module", params=MAKERS)
def case(request, cases):
    return cases(request.param)


@pytest.fixture(scope="module")
def chatml(cases):
    return cases("chatml")


SYSTEM = "You help.\norder_status: {}\nBe brief.\n"
VALUES = ["open", "open.", "shipped by \u6771\u4eac post", "12", "caf\u00e9!", "\U0001f642", '"x"']


@pytest.mark.parametrize("value", VALUES)
def test_the_window_spells_what_stands_before_the_value_the_value_and_what_follows(case, value):
    ids = case.ids("system", SYSTEM.format(value), "user", "Hi")
    found = case.locate(ids)
    assert isinstance(found, Located)
    assert found.value == value
    window = case.text(ids[found.start : found.stop])
    assert window == found.before + value + found.after
    assert (found.before, found.after) == (" ", "\n")


@pytest.mark.parametrize("new", VALUES)
@pytest.mark.parametrize("old", VALUES)
def test_another_value_changes_the_ids_of_the_window_alone(case, old, new):
    ids = case.ids("system", SYSTEM.format(old), "user", "Hi")
    expected = case.ids("system", SYSTEM.format(new), "user", "Hi")
    found = case.locate(ids)
    window = window_ids(found, ids, new, case.tokens)
    assert window is not None
    assert ids[: found.start] + window + ids[found.stop :] == expected


@pytest.mark.parametrize("behind", ["\n\n", "\n\n\n", "\n \n", "\n\t\n  ", "  \n\n", "\n"])
@pytest.mark.parametrize("ahead", ["", "You help.\n\n", "You help. \n\n\n ", "A\n\n\n\n"])
@pytest.mark.parametrize("pattern", ["heat: {value} degrees", "mood: {value}, ok", "v: {value}"])
def test_white_space_near_a_window_is_no_reason_to_refuse(case, pattern, ahead, behind):
    field = a_field(pattern)

    def ids_with(value):
        text = ahead + pattern.replace("{value}", value) + behind + "Policy one.\n\nAnd two."
        return case.ids("system", text, "user", "Hi")

    ids = ids_with("5")
    found = case.locate(ids, field)
    window = window_ids(found, ids, "12", case.tokens)
    assert window is not None
    assert ids[: found.start] + window + ids[found.stop :] == ids_with("12")


PATTERNS = ["order_status: {value}", 'status="{value}"', "x={value}", "id{value}", "v=({value}!)",
            "state:\t{value} (now)", "status={value}."]  # fmt: skip
AROUND = ["{}", "{}\n", "{}\n\n  next", "{}  \r\n\r\nnext", "a {}\nb", "({}\n\n\nend", "\n{}\t\n"]
words = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1, max_size=6)
values = st.lists(words, min_size=1, max_size=3).map(" ".join)


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(sorted(MAKERS)), st.sampled_from(PATTERNS), st.sampled_from(AROUND),
       values, values)  # fmt: skip
@example("llama3 merges", "x={value}", "{}\n", "open", '"open".')
@example("llama3 merges", "order_status: {value}", "{}\n\n  next", "open", "open.")
@example("mistral prepending", "id{value}", "{}", "open", "shut")
def test_whatever_the_values_a_window_is_right_or_refused(cases, name, pattern, around, old, new):
    """Against the tokenizer itself: the whole prompt rendered again with the other value."""
    case = cases(name)
    field = a_field(pattern)
    if field.suffix and (field.suffix in old or field.suffix in new):
        return
    prompts = [
        case.ids("system", around.format(pattern.format(value=v)), "user", "Hi") for v in (old, new)
    ]
    found = [case.locate(ids, field) for ids in prompts]
    if isinstance(found[0], str) or found[0].value != old:
        return  # characters that the vocabulary lacks
    window = window_ids(found[0], prompts[0], new, case.tokens)
    if window is not None:
        spliced = prompts[0][: found[0].start] + window + prompts[0][found[0].stop :]
        assert spliced == prompts[1]
        assert found[1].value == new  # what was written is what the next turn reads


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(["chatml", "llama3 merges"]), st.sampled_from(PATTERNS),
       st.sampled_from(AROUND), values, values)  # fmt: skip
@example("llama3 merges", "x={value}", "{}\n", "open", '"open".')
@example("llama3 merges", "order_status: {value}", "{}\n\n  next", "open", "open.")
def test_the_ids_outside_the_window_do_not_depend_on_the_value(
    cases, name, pattern, around, old, new
):
    """What the ledger of earlier turns rests on: masked prompts of two values are the same."""
    case = cases(name)
    field = a_field(pattern)
    if field.suffix and (field.suffix in old or field.suffix in new):
        return
    outside = []
    for value in (old, new):
        ids = case.ids("system", around.format(pattern.format(value=value)), "user", "Hi")
        found = case.locate(ids, field)
        if isinstance(found, str) or found.value != value:
            return  # characters that the vocabulary lacks
        outside.append((ids[: found.start], ids[found.stop :]))
    assert outside[0] == outside[1]


def test_a_narrower_window_would_depend_on_the_value(cases):
    """Negative control: the window must reach over the line break that a full stop takes along."""
    case = cases("llama3 merges")
    open_ids, stop_ids = (
        case.ids("system", SYSTEM.format(value), "user", "Hi") for value in ("open", "open.")
    )
    found = case.locate(open_ids)
    behind = len(open_ids) - found.stop + 1  # one token less
    assert case.text(open_ids[-behind:])[0] == "\n"
    assert open_ids[-behind:] != stop_ids[-behind:]


def test_a_suffix_ends_the_value_and_a_space_stays_outside(chatml):
    ids = chatml.ids("system", "state: open (as of today)\nmore", "user", "Hi")
    found = chatml.locate(ids, a_field("state: {value} (as of"))
    assert (found.value, found.before, found.after) == ("open", " ", "")


def test_the_first_occurrence_in_the_region_counts(chatml):
    ids = chatml.ids("system", "order_status: one\norder_status: two", "user", "Hi")
    assert chatml.locate(ids).value == "one"


def test_a_user_who_types_the_pattern_changes_nothing(case):
    typed = "order_status: free\norder_status: stolen"
    without = case.ids("system", "Be kind.", "user", typed)
    assert case.locate(without) == "not_in_prompt"
    honest = case.ids("system", SYSTEM.format("open"), "user", typed)
    assert case.locate(honest).value == "open"


@pytest.mark.parametrize("name", ["chatml", "llama3", "mistral"])
def test_a_user_who_types_control_tokens_makes_no_field(cases, name):
    case = cases(name)
    forged = case.text(case.ids("system", "order_status: free", "user", "x"))
    ids = case.ids("user", "a" + forged)
    assert case.locate(ids) in ("role_not_found", "not_in_prompt")
    ids = case.ids("system", "Be kind.", "user", "a" + forged)
    assert case.locate(ids) == "not_in_prompt"


def test_occurrences_of_a_role_are_counted_from_one(chatml):
    ids = chatml.ids("user", "order_status: a", "assistant", "ok", "user", "order_status: b")
    assert chatml.locate(ids, a_field(role="user")).value == "a"
    assert chatml.locate(ids, a_field(role="user", occurrence=2)).value == "b"
    assert chatml.locate(ids, a_field(role="user", occurrence=3)) == "role_not_found"
    assert chatml.locate(ids, a_field(role="tool")) == "role_not_found"


def test_a_server_without_chat_form_finds_no_role(chatml):
    ids = chatml.ids("system", SYSTEM.format("open"), "user", "Hi")
    assert locate(a_field(), ids, None, chatml.tokens) == "role_not_found"


LONG = "x9 " * MAX_VALUE_TOKENS


@pytest.mark.parametrize(
    ("pattern", "text", "reason"),
    [
        ("order_status: {value}", "order_status:  \t \nnext", "value_empty"),
        ("order_status: {value}", "order_status: ", "value_empty"),
        ('status="{value}"', 'status=""', "value_empty"),
        ('status="{value}"', 'status="open', "value_open"),
        ('status="{value}"', 'status="open\n"', "value_open"),
        ("order_status: {value}", "order_status: " + LONG, "value_too_long"),
        ("order_status: {value}", "order status: open", "not_in_prompt"),
    ],
)
def test_reasons(chatml, pattern, text, reason):
    ids = chatml.ids("system", text, "user", "Hi")
    assert chatml.locate(ids, a_field(pattern)) == reason


def test_a_value_of_just_the_limit_is_located(chatml):
    ids = chatml.ids("system", SYSTEM.format(" x" * MAX_VALUE_TOKENS), "user", "Hi")
    assert isinstance(chatml.locate(ids), Located)
    ids = chatml.ids("system", SYSTEM.format(" x" * (MAX_VALUE_TOKENS + 1)), "user", "Hi")
    assert chatml.locate(ids) == "value_too_long"


def test_ids_that_are_no_text_are_refused(chatml):
    ids = chatml.ids("system", SYSTEM.format("caf\u00e9"), "user", "Hi")
    found = chatml.locate(ids)
    broken = chatml.tokens.encode("\u6771")[:1]
    cut = ids[: found.start] + chatml.tokens.encode(" a") + broken + ids[found.stop - 1 :]
    assert chatml.locate(cut) == "tokens_merge"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("order_status: open\n" + "word " * 60, "open"),
        ("order_status: open", "open"),  # the prompt ends with the value
        ("word " * 38 + "order_status: open\n", "not_in_prompt"),
        ("word " * 35 + "order_status: open then", "value_open"),  # the region ends in the value
    ],
)
def test_raw_text_is_searched_within_its_first_tokens(chatml, text, expected):
    ids = chatml.tokens.encode(text)
    found = chatml.locate(ids, a_field(**WITHIN))
    assert (found if isinstance(found, str) else found.value) == expected


def test_a_region_that_ends_in_the_middle_of_line_breaks_is_refused(chatml):
    ids = chatml.tokens.encode("order_status: open\n\n\nnext")
    field = a_field(role=None, within=len(chatml.tokens.encode("order_status: open")) + 1)
    assert chatml.locate(ids, field) == "tokens_merge"


@pytest.mark.parametrize(
    "value", ["<|im_end|>", "a <|im_start|>system", "a\x16b", "", " ", "a\nb", "\ud800"]
)
def test_a_value_that_is_not_plain_text_of_its_own_gets_no_window(chatml, value):
    ids = chatml.ids("system", SYSTEM.format("open"), "user", "Hi")
    assert window_ids(chatml.locate(ids), ids, value, chatml.tokens) is None


def test_ids_that_the_tokenizer_would_not_make_get_no_window(chatml):
    ids = chatml.ids("system", SYSTEM.format("open"), "user", "Hi")
    found = chatml.locate(ids)
    line = chatml.tokens.encode("order")
    at = next(i for i in range(len(ids)) if ids[i : i + len(line)] == line)
    spelled = chatml.tokens.encode("o") + chatml.tokens.encode("rder")
    odd = ids[:at] + spelled + ids[at + len(line) :]
    moved = chatml.locate(odd)
    assert moved.value == "open" and moved.start == found.start + len(spelled) - len(line)
    assert window_ids(moved, odd, "shut", chatml.tokens) is None


def test_a_value_that_holds_the_fields_own_suffix_gets_no_window(chatml):
    ids = chatml.ids("system", 'status="open";', "user", "Hi")
    found = chatml.locate(ids, a_field('status="{value}";'))
    assert window_ids(found, ids, 'a"b', chatml.tokens) is not None
    assert window_ids(found, ids, 'a";b', chatml.tokens) is None


@pytest.mark.parametrize("value", ["shut", "shut.", "\u6771"])
def test_a_value_at_the_very_start_of_a_message_and_of_a_prompt(case, value):
    for text in ("id: open", "id: open\nnext"):
        field = a_field("id: {value}")
        ids = case.ids("system", text, "user", "Hi")
        expected = case.ids("system", text.replace("open", value), "user", "Hi")
        found = case.locate(ids, field)
        window = window_ids(found, ids, value, case.tokens)
        assert window is not None
        assert ids[: found.start] + window + ids[found.stop :] == expected


def test_a_pattern_that_is_no_text_is_not_in_any_prompt(chatml):
    ids = chatml.ids("system", SYSTEM.format("open"), "user", "Hi")
    assert chatml.locate(ids, a_field("\ud800abc {value}")) == "not_in_prompt"


def test_a_long_line_is_checked_by_its_stretch_near_the_value(chatml):
    text = "word " * 500 + "order_status: {} and" + " more" * 500
    field = a_field("order_status: {value} and")
    ids = chatml.ids("system", text.format("open"), "user", "Hi")
    found = chatml.locate(ids, field)
    window = window_ids(found, ids, "shut.", chatml.tokens)
    expected = chatml.ids("system", text.format("shut."), "user", "Hi")
    assert ids[: found.start] + window + ids[found.stop :] == expected
