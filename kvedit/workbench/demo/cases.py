"""What the demo asks: two documents, placed at several offsets and in both orders.

A model of 135M parameters can look a fact up only when the answer is begun for it in the
document's own words, so every prompt ends with the first words of the answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

SKILL_NAMES = ("policy", "tools")
INSTRUCTION = "You are the support assistant of the Fernhill store. Answer from the documents."


@dataclass(frozen=True, slots=True)
class Case:
    """One question. `layout` names the texts in front of it, in order; `expected` is the answer's
    beginning, a fact that stands in the document."""

    layout: tuple[str, ...]
    question: str
    lead: str
    expected: str

    @property
    def title(self) -> str:
        """The layout in one text, as in "policy + tools"."""
        return " + ".join(self.layout)


CASES = (
    Case(
        ("policy",),
        "What colour is the label for frozen goods?",
        "The label for frozen goods is",
        "blue",
    ),
    Case(
        ("tools",),
        "What is the access word for repairs?",
        "The access word for repairs is",
        "lantern",
    ),
    Case(
        ("policy", "tools"),
        "Where does the ferry sail from?",
        "The ferry to the islands sails from",
        "Rotterdam",
    ),
    Case(
        ("policy", "tools"),
        "Who reads the log?",
        "The log is read by the auditor,",
        "Beatrix Hollander",
    ),
    Case(
        ("tools", "policy"),
        "What is the shop dog called?",
        "The shop dog in Bergen is called",
        "Pepper",
    ),
    Case(
        ("chat", "policy"),
        "Where do freight trucks leave?",
        "The freight trucks leave from gate",
        "17",
    ),
    Case(
        ("chat", "tools"),
        "What does error code 1317 mean?",
        "Error code 1317 means that",
        "the return window is closed",
    ),
    Case(
        ("chat", "tools", "policy"),
        "When does the yearly audit take place?",
        "The yearly audit of refunds takes place in",
        "November",
    ),
)


def load_text(name: str) -> str:
    """The text file `name` that ships with the demo."""
    return (files("kvedit.workbench.demo") / "data" / f"{name}.md").read_text(encoding="utf-8")


def prompt_of(case: Case) -> str:
    """The whole prompt: instruction, the texts of the layout, question, begun answer."""
    texts = "\n".join(load_text(name) for name in case.layout)
    return f"{INSTRUCTION}\n\n{texts}\nQuestion: {case.question}\nAnswer: {case.lead}"


def is_right(case: Case, answer: str) -> bool:
    """Whether the generated text begins with the fact from the document."""
    return answer.strip().startswith(case.expected)
