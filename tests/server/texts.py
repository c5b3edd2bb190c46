"""Text for prompts and skills: English, so that the tokenizer merges as it does in earnest."""

from __future__ import annotations

import random
from typing import Any

_WHO = ("The buyer", "A shop", "Our courier", "The bank", "Every guest", "The clerk", "A driver")
_DOES = ("returns", "reports", "confirms", "collects", "inspects", "rejects", "schedules")
_WHAT = ("the invoice", "a damaged parcel", "the refund", "two spare keys", "the contract")
_WHEN = ("before noon", "within nine days", "on Friday", "after the call", "twice a year")


def english(seed: Any, num_sentences: int) -> str:
    """Sentences of about ten tokens. Another seed gives another text from the first words on."""
    rng = random.Random(f"kvedit text {seed}")

    def sentence() -> str:
        words = [rng.choice(part) for part in (_WHO, _DOES, _WHAT, _WHEN)]
        return f"{' '.join(words)} under rule {rng.randrange(1000, 9999)}."

    return " ".join(sentence() for _ in range(num_sentences))
