"""What proves that a turn is the caller's, by the server's setting."""

from __future__ import annotations

import pytest

from kvedit.edit import proofs as module
from kvedit.edit.proofs import CHOICES, EXPIRED, NEEDS_REPLY, TokenBook, claim_of
from kvedit.request.options import Options, Sealed

ASKED = Options(conversation="d", sealed=Sealed(proof="d", is_issued=True))
SENT = Options(conversation="d", sealed=Sealed(proof="d"))
NAMED = Options(conversation="n", sealed=Sealed(proof="n"))


def claim(options, book=None, *, namespace="ns", has_salt=False, trust="tokens", epoch=0):
    return claim_of(
        options,
        namespace,
        has_salt=has_salt,
        trust=trust,
        book=book or TokenBook(),
        epoch=epoch,
    )


def issued():
    book = TokenBook()
    book.take_in(ASKED, "ns", 0)
    return book


@pytest.mark.parametrize(
    ("trust", "has_salt", "options", "is_proven", "by_reply"),
    [
        ("tokens", False, Options(), False, False),
        ("tokens", True, Options(), False, True),
        ("tokens", False, NAMED, False, False),
        ("tokens", True, NAMED, False, True),
        ("replies", False, Options(), False, True),
        ("replies", False, NAMED, False, True),
        ("names", False, Options(), False, False),
        ("names", False, NAMED, True, False),
        ("names", True, NAMED, True, True),
    ],
)
def test_what_proves_by_setting_and_salt(trust, has_salt, options, is_proven, by_reply):
    got = claim(options, has_salt=has_salt, trust=trust)
    assert (got.is_proven, got.by_reply) == (is_proven, by_reply)
    assert got.scope == ("ns", options.conversation or "")
    assert got.can_return == (is_proven or by_reply)


def test_a_token_proves_in_its_namespace_and_epoch_alone():
    book = issued()
    assert claim(SENT, book).is_proven
    assert claim(SENT, book).scope == ("ns", "d")
    for other in (
        claim(SENT, book, namespace="ns2"),
        claim(SENT, book, epoch=1),
        claim(NAMED, book),
        claim(SENT),
    ):
        assert not other.is_proven
    assert claim(SENT, book, epoch=1).is_expired
    assert not claim(SENT, book, namespace="ns2").is_expired


def test_only_the_process_that_made_a_token_enters_it():
    book = TokenBook()
    book.take_in(SENT, "ns", 0)
    book.take_in(NAMED, "ns", 0)
    book.take_in(Options(), "ns", 0)
    assert len(book) == 0 and not claim(SENT, book).is_proven


def test_a_hint_says_what_would_help():
    assert claim(Options()).hint == CHOICES
    assert claim(Options(), has_salt=True).hint == NEEDS_REPLY
    assert claim(SENT, issued(), epoch=1).hint == EXPIRED
    for choice in ('"conversation": true', "cache_salt", "--kvedit-trust"):
        assert choice in CHOICES


def test_the_book_is_bounded_and_keeps_what_is_used(monkeypatch):
    monkeypatch.setattr(module, "MAX_ISSUED", 2)
    book = issued()
    for digest in ("e", "f"):
        assert claim(SENT, book).is_proven
        sealed = Sealed(proof=digest, is_issued=True)
        book.take_in(Options(conversation=digest, sealed=sealed), "ns", 0)
    assert len(book) == 2 and claim(SENT, book).is_proven
    book.clear()
    assert not claim(SENT, book).is_proven


def test_what_levels_the_ranks_forgets_tokens_too():
    """One rank may have taken a token in before an error, another may not."""
    from types import SimpleNamespace
    from typing import Any

    import torch

    from kvedit.config import Config
    from sglang_patches.scheduler.edit.room import EditRoom
    from sglang_patches.scheduler.wiring.levelling import level

    unused: Any = None
    edits = EditRoom(
        choose=unused,
        tokenizer=None,
        config=Config(),
        page_size=1,
        max_request_tokens=0,
        conversations=issued(),
    )
    desk: Any = SimpleNamespace(registry=SimpleNamespace(all=lambda: ()), pins=())
    tree: Any = SimpleNamespace(
        full_evictable_size=lambda: 0,
        swa_evictable_size=lambda: 0,
        evict=lambda params: None,
        token_to_kv_pool_allocator=SimpleNamespace(free_pages=torch.tensor([2, 1])),
    )
    level(edits, desk, tree)
    assert not claim(SENT, edits.conversations).is_proven
