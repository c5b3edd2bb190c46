"""Agents inside agents: the prompt of a sub-agent is a skill, used alone and inside others.

A planner reads the clerk's instructions to write tasks for it, the clerk works by the same
instructions, a reviewer reads them again to judge the answers. They are computed once.
"""

from __future__ import annotations

from typing import Any

import sglang as sgl
from _steps import Steps, endpoint, parsed_arguments, register

from kvedit import lang
from kvedit.workbench.demo.cases import load_text

CLERK = (
    "You are the order clerk. You carry out one task at a time with the tools of this sheet, and "
    "answer with the tool's name and its fields.\n\n"
)
TASKS = ("A parcel has not arrived.", "A toaster broke after a year.")


@sgl.function
def planner(s: Any) -> None:
    s += sgl.system("You plan the work of one agent. Its instructions:\n\n" + lang.skill("clerk"))
    s.sync()  # a fork fills the cache once for all branches, with the text that is there by then
    branches = s.fork(len(TASKS))
    for branch, problem in zip(branches, TASKS, strict=True):
        branch += sgl.user(f"Write the clerk's task for this problem: {problem}")
        branch += sgl.assistant(sgl.gen("task", max_tokens=24, temperature=0))
    s["branches"] = list(branches)


@sgl.function
def clerk(s: Any, task: str) -> None:
    s += sgl.system(lang.skill("clerk"))
    s += sgl.user(task)
    s += sgl.assistant(sgl.gen("answer", max_tokens=24, temperature=0))


@sgl.function
def reviewer(s: Any, answers: list[str]) -> None:
    s += sgl.system(
        "You review agents and trust nobody. These are the instructions that the agent had:\n\n"
        + lang.skill("clerk")
        + "\nAn answer that names no tool is wrong."
    )
    s += sgl.user("The agent's answers:\n" + "\n".join(answers))
    s += sgl.assistant(sgl.gen("verdict", max_tokens=24, temperature=0))


def main() -> None:
    args = parsed_arguments(__doc__)
    steps = Steps()
    with endpoint(args, "nested-agents") as backend:
        register(backend, skills={"clerk": CLERK + load_text("tools")})
        branches = planner.run(backend=backend)["branches"]
        tasks = [steps.add(f"planner, branch {i}", b, "task") for i, b in enumerate(branches, 1)]
        answers = []
        for number, task in enumerate(tasks, start=1):
            state = clerk.run(task, backend=backend)
            answers.append(steps.add(f"clerk, task {number}", state, "answer"))
        steps.add("reviewer", reviewer.run(answers, backend=backend), "verdict")
    steps.print()


if __name__ == "__main__":
    main()
