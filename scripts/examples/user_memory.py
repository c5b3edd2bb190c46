"""An agent that remembers its user: a memory that changes, placed late in the prompt.

The memory stands in the last user message, behind the document and the history, so that a change
leaves all of that as it was; the memory itself is compiled alone and spliced in wherever the
growing history has pushed it.
"""

from __future__ import annotations

from typing import Any

import sglang as sgl
from _steps import Steps, endpoint, parsed_arguments, register

from kvedit import lang
from kvedit.workbench.demo.cases import load_text

FACTS = (
    "The customer is called Ada and lives in Bergen, in the house by the harbour.",
    "Ada is a member of the Fernhill club and pays with a credit card.",
    "Ada bought a laptop in March; its battery was replaced in Porto during the summer.",
    "Ada prefers short answers, reads e-mail in the evening and does not want phone calls.",
    "Ada gave a gift card to her brother Nils, who lives on an island without road traffic.",
    "Ada once sent a pair of headphones back, since the cable was missing.",
    "Ada plans to move to Utrecht next year and will then need nine garden chairs.",
)
# (how many facts the agent knows by then, question)
TURNS = (
    (4, "Is shipping free for me?"),
    (4, "How long does a refund take for me?"),
    (5, "How can my brother get a parcel?"),
    (7, "How long may I return garden chairs?"),
    (7, "Can you call me about it?"),
)


def memory_text(num_facts: int) -> str:
    return "What is known about the customer:\n" + "".join(f"- {f}\n" for f in FACTS[:num_facts])


@sgl.function
def assistant(s: Any, memory: str, history: list[tuple[str, str]], question: str) -> None:
    s += sgl.system(
        "You are the support assistant of the Fernhill store.\n\n" + lang.skill("policy")
    )
    for asked, answered in history:
        s += sgl.user(asked)
        s += sgl.assistant(answered)
    s += sgl.user(lang.memory("customer-ada", memory) + "\n" + question)
    s += sgl.assistant(sgl.gen("answer", max_tokens=24, temperature=0))


def main() -> None:
    args = parsed_arguments(__doc__)
    steps = Steps()
    history: list[tuple[str, str]] = []
    with endpoint(args, "user-memory") as backend:
        register(backend, skills={"policy": load_text("policy")})
        for number, (num_facts, question) in enumerate(TURNS, start=1):
            state = assistant.run(memory_text(num_facts), history, question, backend=backend)
            answer = steps.add(f"turn {number}, {num_facts} facts", state, "answer")
            history.append((question, answer))
    steps.print()


if __name__ == "__main__":
    main()
