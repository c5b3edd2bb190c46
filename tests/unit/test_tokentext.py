"""Bytes of tokens: joined they are the text, whatever the tokenizer's spelling of a token."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvedit.errors import Unsupported
from kvedit.text.tokens import UNKNOWN, TokenText
from tests.unit.chat_tokenizers import llama3_like, sentencepiece_like, with_form

TEXTS = [
    "a",
    "order_status: open\r\n\t x",
    "na\u00efve \u6771\u4eac \U0001f642",
    "\x00\x7f",
    "a  b\n\n\n c",
]
MAKERS = {
    "llama3": llama3_like,
    "prepending": lambda: sentencepiece_like(prepend=True),
    "sentencepiece": lambda: sentencepiece_like(prepend=False),
}


@pytest.fixture(scope="module", params=["default", *MAKERS])
def tokenizer(request, default_model_dir):
    if request.param == "default":
        return with_form(default_model_dir, "chatml")
    return MAKERS[request.param]()


@pytest.fixture(scope="module")
def tokens(tokenizer):
    return TokenText(tokenizer)


@pytest.mark.parametrize("text", TEXTS)
def test_the_joined_bytes_are_the_text(tokens, text):
    data, ends = tokens.joined(tokens.encode(text))
    assert data.decode() in (text, " " + text)
    assert int(ends[-1]) == len(data)


@given(st.text(max_size=60))
def test_the_ends_cut_the_bytes_into_those_of_each_token(whole_alphabet, text):
    ids = whole_alphabet.encode(text)
    data, ends = whole_alphabet.joined(ids)
    starts = [0, *ends.tolist()]
    pieces = [data[a:b] for a, b in zip(starts, ends.tolist(), strict=False)]
    assert pieces == [whole_alphabet.token_bytes(i) for i in ids]
    assert data == text.encode()


def test_a_character_that_the_vocabulary_cannot_spell_is_seen_to_be_lost(default_tokens):
    assert default_tokens.joined(default_tokens.encode("a\x16b"))[0] == b"ab"


@pytest.fixture(scope="module")
def whole_alphabet():
    return TokenText(llama3_like())  # the default vocabulary lacks some bytes


@pytest.fixture(scope="module")
def default_tokens(default_model_dir):
    return TokenText(with_form(default_model_dir, "chatml"))


def test_control_tokens_are_special_and_read_as_their_text(default_tokens):
    ids = default_tokens.encode("<|im_start|>system\nhi<|im_end|>")
    assert default_tokens.special_ids.issuperset({ids[0], ids[-1]})
    assert {"<|im_start|>", "<|im_end|>"} <= default_tokens.special_texts
    assert default_tokens.joined(ids)[0] == b"<|im_start|>system\nhi<|im_end|>"


def test_an_added_run_of_blanks_is_text_and_no_control_token(default_model_dir):
    tokenizer = with_form(default_model_dir, "chatml")
    tokenizer.add_tokens(["\n\n\n\n\n", "\u2581\u2581\u2581", "<tool_call>"])
    tokens = TokenText(tokenizer)
    assert "<tool_call>" in tokens.special_texts
    assert not any(not text.replace("\u2581", "").strip() for text in tokens.special_texts)
    assert tokens.joined(tokens.encode("a\n\n\n\n\nb"))[0] == b"a\n\n\n\n\nb"


def test_an_id_outside_the_vocabulary_matches_no_text(default_tokens):
    ids = array("q", [-1, 10**6, 1 << 60])
    data, ends = default_tokens.joined(ids)
    assert data == UNKNOWN * 3
    assert ends.tolist() == [1, 2, 3]
    with pytest.raises(UnicodeDecodeError):
        data.decode()


def test_no_ids_have_no_bytes(default_tokens):
    data, ends = default_tokens.joined(array("q"))
    assert (data, ends.tolist(), ends.dtype) == (b"", [], np.int64)


def test_a_vocabulary_without_byte_fallback_is_refused_with_every_reason():
    with pytest.raises(Unsupported, match="byte-level BPE.*sentencepiece") as caught:
        TokenText(sentencepiece_like(prepend=False, byte_fallback=False))
    assert len(caught.value.reasons) == 2


def test_a_tokenizer_that_changes_text_is_refused(default_model_dir):
    from tokenizers import normalizers

    tokenizer = with_form(default_model_dir, "chatml")
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(Unsupported, match="expected the bytes of the sample text"):
        TokenText(tokenizer)
