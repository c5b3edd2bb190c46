"""A support agent: two documents as skills, and an order status that changes with every turn.

The status stands in front of both documents, where an ordinary prefix cache would compute
everything behind it again. The client re-sends its whole history each turn, as chat clients do.
"""

from __future__ import annotations

from typing import Any

import sglang as sgl
from _steps import Steps, endpoint, parsed_arguments, register

from kvedit import lang
from kvedit.workbench.demo.cases import load_text

TURNS = (
    ("paid", "I bought headphones. What happens next?"),
    ("packed", "Can I still change the address?"),
    ("packed", "And how much was express shipping?"),
    ("sent", "What if the parcel is late?"),
    ("delivered", "How long may I return them?"),
)
STATUS = {"pattern": "order_status: {value}", "base": "unknown"}


@sgl.function
def support(s: Any, status: str, history: list[tuple[str, str]], question: str) -> None:
    s += sgl.system(
        "You are the support assistant of the Fernhill store.\n"
        + lang.field("order_status", status)
        + "\n\n"
        + lang.skill("policy")
        + "\n"
        + lang.skill("tools")
    )
    for asked, answered in history:
        s += sgl.user(asked)
        s += sgl.assistant(answered)
    s += sgl.user(question)
    s += sgl.assistant(sgl.gen("answer", max_tokens=24, temperature=0))


def main() -> None:
    args = parsed_arguments(__doc__)
    steps = Steps()
    history: list[tuple[str, str]] = []
    with endpoint(args, "support-agent") as backend:
        register(
            backend,
            skills={name: load_text(name) for name in ("policy", "tools")},
            fields={"order_status": STATUS},
        )
        for number, (status, question) in enumerate(TURNS, start=1):
            state = support.run(status, history, question, backend=backend)
            answer = steps.add(f"turn {number}, {status}", state, "answer")
            history.append((question, answer))
    steps.print()


if __name__ == "__main__":
    main()
