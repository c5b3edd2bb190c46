"""Namespaces and identities: different inputs, different digests."""

from array import array

import pytest

from kvedit.errors import BadRequest
from kvedit.identity import digest, host_identity, segment_identity
from kvedit.namespace import SHARED, namespace_tag


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param((None, None, "alpha"), (None, "alpha", None), id="extra_key spoofs adapter"),
        pytest.param(("a", "bc", None), ("ab", "c", None), id="boundary slides"),
        pytest.param((None, "x", None), ("", "x", None), id="absent is not empty"),
        pytest.param(("SAME", None, None), (None, None, "SAME"), id="salt spoofs adapter"),
        pytest.param((None, None, None), ("", "", ""), id="all absent, all empty"),
        pytest.param(("a\0b", None, None), ("a", "b", None), id="NUL is no separator"),
        pytest.param(("é", None, None), ("e\u0301", None, None), id="no unicode folding"),
    ],
)
def test_tuples_that_plain_joining_confuses_get_two_tags(one, other):
    assert namespace_tag(*one) != namespace_tag(*other)


def test_a_tag_is_stable_and_never_the_shared_name():
    tag = namespace_tag("salt", None, "adapter")
    assert tag == namespace_tag("salt", None, "adapter")
    assert tag.startswith("ns:") and len(tag) == 3 + 64
    assert not SHARED.startswith("ns:")


def test_a_lone_surrogate_is_a_value_of_its_own():
    assert namespace_tag("\ud800", None, None) != namespace_tag("\ud801", None, None)


@pytest.mark.parametrize("value", [0, b"x", ["a"], True])
def test_a_field_that_is_no_string_is_refused_by_name(value):
    with pytest.raises(BadRequest, match="kvedit: extra_key: expected a string"):
        namespace_tag(None, value, None)


def test_a_digest_covers_domain_field_name_and_value():
    made = {
        digest("one", {"a": b"x"}),
        digest("two", {"a": b"x"}),
        digest("one", {"b": b"x"}),
        digest("one", {"a": b"y"}),
        digest("one", {"a": None}),
        digest("one", {"a": b""}),
        digest("one", {}),
        digest("one", {"a": b"x", "b": b""}),
        digest("one", {"a": b"x", "b": None}),
    }
    assert len(made) == 9


def test_field_order_does_not_matter():
    assert digest("d", {"a": b"1", "b": b"2"}) == digest("d", {"b": b"2", "a": b"1"})


def test_every_fact_about_the_host_changes_its_identity():
    facts = {
        "model": "m@rev1",
        "weight_epoch": "7",
        "kv_dtype": "bf16",
        "rope": "llama3/500000/32",
        "page_size": "16",
        "tp": "1/0",
        "quantization": None,
    }
    changed = {host_identity({**facts, name: "changed"}) for name in facts}
    assert len(changed | {host_identity(facts)}) == len(facts) + 1


def test_a_segment_identity_covers_each_of_its_parts():
    base = {
        "token_ids": array("q", [1, 2, 3]),
        "compile_prefix": array("q", [0]),
        "namespace": "shared",
        "host": "h",
    }
    variants = [
        base,
        {**base, "token_ids": array("q", [1, 2])},
        {**base, "compile_prefix": array("q")},
        {**base, "namespace": "ns:1"},
        {**base, "host": "h2"},
        # the border between prefix and ids moves, the sequence of ids does not
        {**base, "compile_prefix": array("q", [0, 1]), "token_ids": array("q", [2, 3])},
    ]
    assert len({segment_identity(**v) for v in variants}) == len(variants)
