"""What is said when a field is declared, and the rules of the texts in it."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass

from kvedit.reason import Reason
from kvedit.request.strategy import Strategy

ROLES = ("system", "user", "tool")
VALUE, NAME, LABEL = "{value}", "{name}", "{label}"
# Says it as the prompt does. A sentence about overriding is what small models then talk about; a
# larger one may do better with it.
DEFAULT_TEMPLATE = "[update, current value] {label}{value}"
MAX_PATTERN_CHARS = 500
MAX_TEMPLATE_CHARS = 500
MAX_ANCHOR_CHARS = 200
MAX_VALUE_CHARS = 4096
MIN_PREFIX_CHARS = 3  # visible ones; a shorter text stands everywhere in a prompt
MIN_MARKER_CHARS = 8  # visible ones; a shorter marker would forbid innocent values


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """The region of a prompt in which a field is looked for.

    Content of the ``occurrence``-th (from 1) message of ``role``; or, for raw text, ``role`` None
    and the first ``within`` tokens of the prompt.
    """

    role: str | None = "system"
    occurrence: int = 1
    within: int | None = None

    def may_meet(self, other: Where) -> bool:
        """Whether some prompt has a text that lies in both regions."""
        if self.role is None or other.role is None:
            return True
        return (self.role, self.occurrence) == (other.role, other.occurrence)


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a declaration and the field that it makes have in common.

    pattern        one line with one {value}
    anchor         a line goes directly before its last occurrence; None: the chat form says where
    cross_request  a value seen in one conversation may be the base of another
    """

    name: str
    pattern: str
    strategy: Strategy
    base: str | None
    where: Where
    anchor: str | None
    template: str
    cross_request: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration(Terms):
    """A parsed POST /kvedit/fields."""

    cache_salt: str | None
    extra_key: str | None
    shared: bool
    replace: bool


def text_problem(value: str) -> Reason | None:
    """Why a text cannot be the value of any field: VALUE_EMPTY, VALUE_TOO_LONG or VALUE_MARKUP
    (a line break, another control character, no Unicode)."""
    if not value.strip():
        return Reason.VALUE_EMPTY
    if len(value) > MAX_VALUE_CHARS:
        return Reason.VALUE_TOO_LONG
    return None if is_one_line(value) else Reason.VALUE_MARKUP


def is_one_line(text: str) -> bool:
    """No control characters (line breaks are some), line or paragraph separators, surrogates."""
    return not any(unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") for char in text)


def filled(template: str, name: str, pattern: str) -> tuple[str, str]:
    """The text of a line before and behind the value; {label} is the pattern's text before its
    own value, and {label}{value} the whole pattern."""
    head, _, tail = template.partition(VALUE)  # split first: a name may hold "{value}"
    label, _, unit = pattern.partition(VALUE)
    if head.endswith(LABEL):
        tail = unit + tail
    texts = [text.replace(LABEL, label).replace(NAME, name) for text in (head, tail)]
    return texts[0], texts[1]


def marker_of(template: str, name: str, pattern: str) -> str | None:
    """The literal text by which a line of this template is recognised, folded; None if it has no
    part of at least ``MIN_MARKER_CHARS`` visible characters to tell it by.

    Its beginning; with name and label filled in when that is too short; else what follows the
    value.
    """
    beginning = template.partition(VALUE)[0].partition(NAME)[0].partition(LABEL)[0]
    for literal in (beginning, *filled(template, name, pattern)):
        folded = fold(literal)
        if num_visible(folded) >= MIN_MARKER_CHARS:
            return folded
    return None


def fold(text: str) -> str:
    """For comparing texts that look alike: compatibility forms, case, white space and characters
    without width make no difference."""
    shown = (c for c in unicodedata.normalize("NFKC", text) if unicodedata.category(c) != "Cf")
    return " ".join("".join(shown).casefold().split())


def num_visible(text: str) -> int:
    """Number of characters that are no white space."""
    return sum(not char.isspace() for char in text)
