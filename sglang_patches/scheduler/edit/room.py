"""What editing stands on: the books of fields and turns, and the tree by one question."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from kvedit.config import Config
from kvedit.edit.donor_paths import PathBook
from kvedit.edit.ledger import Ledger
from kvedit.edit.proofs import TokenBook
from kvedit.fields.book import FieldBook
from kvedit.fields.public_values import SeenValues
from kvedit.text.chat_probe import ChatForm
from kvedit.text.tokens import TokenText
from sglang_patches.scheduler.ports import Choose


@dataclass(kw_only=True)
class EditRoom:
    """The same on every rank.

    choose      how a prompt would be spelled now
    tokenizer   the host's; None with --skip-tokenizer-init
    chat_form   comes with the first field that has a role
    weight_epoch   counts changes of whatever shapes KV; turns of an older one are no bases
    max_request_tokens   what a prompt and its output may have together, plus one
    """

    choose: Choose
    tokenizer: Any
    config: Config
    page_size: int
    max_request_tokens: int
    fields: FieldBook = field(default_factory=FieldBook)
    chat_form: ChatForm | None = None
    ledger: Ledger = field(default_factory=Ledger)
    conversations: TokenBook = field(default_factory=TokenBook)
    paths: PathBook = field(default_factory=PathBook)
    seen_values: SeenValues = field(default_factory=SeenValues)
    weight_epoch: int = 0

    @cached_property
    def tokens(self) -> TokenText:
        """The tokenizer's text, token by token. Raises Unsupported where it cannot be told; a
        server like that refuses to declare fields."""
        return TokenText(self.tokenizer)

    def decode(self, ids: array[int]) -> str:
        """Text of ``ids``, special tokens kept; empty without a tokenizer (then a match starts
        at a skill's first token or not at all)."""
        if self.tokenizer is None:
            return ""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def forget_turns(self) -> None:
        """No turn or path of before is a base."""
        self.ledger.clear()
        self.paths.clear()

    def forget_everything(self, last_lineage: int) -> None:
        """As after a restart, but that lineages up to ``last_lineage`` are used up."""
        self.ledger.forget_everything(last_lineage)
        self.conversations.clear()
        self.paths.clear()
        self.seen_values.clear()
