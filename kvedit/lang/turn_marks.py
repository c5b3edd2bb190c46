"""What a chat template writes around the messages, read off from conversations that it rendered.

A frontend that builds prompts as text needs these marks to write the very prompt that the server's
own chat route would.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvedit.errors import Unsupported

Message = dict[str, str]
Render = Callable[[list[Message], bool], str]
"""(messages, add_generation_prompt) -> the rendered text. Raises KvEditError for a refusal."""

# Words that no template writes itself, and without spaces at the ends that one might trim.
_CONTENTS = ("Sentinel-Ash", "Sentinel-Birch", "Sentinel-Cedar", "Sentinel-Doum")
_ROLES = ("system", "user", "assistant", "user")


@dataclass(frozen=True, slots=True)
class TurnMarks:
    """``around``: role -> (text in front of a message, text behind it); control tokens spelled.

    ``default_system``: the system message of a conversation that brings none; None without one.
    """

    around: dict[str, tuple[str, str]]
    default_system: str | None

    def render(self, messages: list[Message], add_generation_prompt: bool) -> str:
        """The same text that the template makes of a conversation with a system message."""
        marked = [(self.around[m["role"]], m["content"]) for m in messages]
        text = "".join(front + content + back for (front, back), content in marked)
        return text + (self.around["assistant"][0] if add_generation_prompt else "")


def probe() -> list[Message]:
    """system, user, assistant, user: what programs write, and how it follows; no tool."""
    return [{"role": r, "content": c} for r, c in zip(_ROLES, _CONTENTS, strict=True)]


def read_turn_marks(render: Render) -> TurnMarks:
    """Find the marks of the template behind ``render``.

    Raises Unsupported when the template has no system message, or writes a message differently
    depending on its neighbours; and what ``render`` raises.
    """
    messages = probe()
    whole = render(messages, False)
    system_front = whole.partition(_CONTENTS[0])[0]
    user_back = _behind_last(render(messages[:2], False), 1)
    assistant_front = _without_front(_behind_last(render(messages[:2], True), 1), user_back)
    assistant_back = _behind_last(render(messages[:3], False), 2)
    user_front = _without_front(_between(whole, 2, 3), assistant_back)
    system_back = _without_back(_between(whole, 0, 1), user_front)
    around = {
        "system": (system_front, system_back),
        "user": (user_front, user_back),
        "assistant": (assistant_front, assistant_back),
    }
    bare = render(messages[1:2], False).partition(_CONTENTS[1])[0]
    marks = TurnMarks(around, _default_system(_without_back(bare, user_front), around["system"]))
    if marks.render(messages, False) != whole:
        raise _unsupported("the same marks at every place of a conversation", "other ones")
    return marks


def _default_system(front: str, around_system: tuple[str, str]) -> str | None:
    """``front``: what stands before the first user message of a conversation without system."""
    if not front:
        return None
    return _without_back(_without_front(front, around_system[0]), around_system[1])


def _between(text: str, first: int, second: int) -> str:
    return text.partition(_CONTENTS[first])[2].partition(_CONTENTS[second])[0]


def _behind_last(text: str, index: int) -> str:
    front, found, behind = text.partition(_CONTENTS[index])
    if not found:
        raise _unsupported(f"a {_ROLES[index]} message in the rendered text", "none")
    return behind


def _without_front(text: str, front: str) -> str:
    if not text.startswith(front):
        raise _unsupported(f"text that begins with {front!r}", repr(text[:80]))
    return text[len(front) :]


def _without_back(text: str, back: str) -> str:
    if not text.endswith(back):
        raise _unsupported(f"text that ends with {back!r}", repr(text[-80:]))
    return text[: len(text) - len(back)]


def _unsupported(expected: str, got: str) -> Unsupported:
    return Unsupported([f"chat template: expected {expected}, got {got}"])
