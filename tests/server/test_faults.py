"""An exception inside any hook costs that request its plan, and nobody anything else."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvedit.workbench.model_store import default_model_dir
from tests.server.canary import NUM_NEW, Canary, canary, heading, question
from tests.server.harness import HttpError, Server, fresh_name
from tests.server.waiting import until

pytestmark = pytest.mark.real_server


def errors(server: Server, *hooks: str) -> int:
    counted = server.status()["counters"]["hook_errors"]
    return sum(counted.get(hook, 0) for hook in hooks)


def num_copied(server: Server) -> int:
    count: int = server.status()["counters"]["tokens"]["copied"]
    return count


def assert_unharmed(server: Server, mine: Canary, name: str) -> None:
    """Slots add up, a plain request is exact, and the same skill is spliced again."""
    assert not server.audit()
    assert server.status()["queued_copies"] == 0
    key = fresh_name()
    plain = mine.ask(server, ("plain", key), extra_key=key, kvedit={"splice": "off"})
    assert plain.split == (0, 0, 0, plain.prompt_tokens)
    until(lambda: spliced_again(server, mine), f"{name} is spliced again")
    assert server.healthy()


def spliced_again(server: Server, mine: Canary) -> bool:
    """A prompt nobody asked before, so that its prefix is not the skill's only cached one."""
    return mine.ask(server, fresh_name()).report["composed"] > 200


def fresh_prefix(server: Server, mine: Canary, seed: Any) -> list[int]:
    return mine.prompt(seed)


def cached_prefix(server: Server, mine: Canary, seed: Any) -> list[int]:
    """The prompt's head and seam are cached: the splice takes the load-back entry."""
    server.generate(heading(seed) + mine.skill[:16], kvedit={"splice": "off"})
    return mine.prompt(seed)


PROMPTS: dict[str, Callable[[Server, Canary, Any], list[int]]] = {
    "fresh": fresh_prefix,
    "cached": cached_prefix,
}
# hook, entry, error counted under, what is still composed (None: there is no report)
CASES: list[tuple[str, str, str, bool | None]] = [
    ("intake", "fresh", "intake", None),
    ("match_prefix", "fresh", "match_prefix", False),
    ("init_load_back", "cached", "init_load_back", False),
    ("checkpoint", "fresh", "checkpoint", False),
    ("realise", "fresh", "checkpoint", False),
    ("realise", "cached", "init_load_back", False),
    ("hand_over", "fresh", "checkpoint", False),
    ("hand_over", "cached", "init_load_back", False),
    ("relocate", "fresh", "relocate", True),
    ("cover", "cached", "cover", None),
]


@pytest.mark.parametrize(
    ("hook", "entry", "counted", "composed"), CASES, ids=[f"{c[0]}-{c[1]}" for c in CASES]
)
def test_a_failing_hook_costs_the_plan_only(
    base: Server, hook: str, entry: str, counted: str, composed: bool | None
) -> None:
    mine = canary((hook, entry))
    name = mine.register(base)
    prompt = PROMPTS[entry](base, mine, (hook, entry))
    before = errors(base, counted)
    base.fault(hook)
    answer = base.generate(prompt, num_new=NUM_NEW)
    assert errors(base, counted) == before + 1
    assert mine.answered(answer), answer.text
    if composed is not None:
        assert (answer.report["composed"] > 200) is composed
        assert sum(answer.split) == len(prompt)
    if composed is False:
        assert {"skill": name, "reason": "internal_error"} in answer.report["refused"]
    assert_unharmed(base, mine, name)


@pytest.mark.parametrize("hooks", [("forward",), ("relocate", "relocate_ref")], ids="+".join)
@pytest.mark.parametrize("entry", ["fresh", "cached"])
def test_a_copy_that_never_runs_is_never_read(
    base: Server, hooks: tuple[str, ...], entry: str
) -> None:
    """The request that stands on unwritten slots is answered with an error; one that runs beside
    it on composed tokens of its own, and every later one, is right."""
    mine, other = canary((hooks, entry)), canary((hooks, entry, "other"))
    name = mine.register(base)
    other.register(base)
    prompt = PROMPTS[entry](base, mine, (hooks, entry))
    copied = num_copied(base)
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(base.generate, other.prompt((hooks, entry)), num_new=60)
        until(lambda: num_copied(base) > copied, "the other one's copy")
        for hook in hooks:
            base.fault(hook)
        with pytest.raises(HttpError) as failure:
            base.generate(prompt, num_new=NUM_NEW)
        assert failure.value.status == 500
        assert beside.result().text.startswith(other.answer)
    answer = base.generate(prompt, num_new=NUM_NEW)
    assert mine.answered(answer), "the same prompt works afterwards"
    assert_unharmed(base, mine, name)


@pytest.mark.parametrize("hook", ["finish_compile", "intake"])
def test_a_failing_compile_is_reported_and_can_be_repeated(base: Server, hook: str) -> None:
    mine, name = canary((hook, "compile")), fresh_name()
    base.fault(hook)
    with pytest.raises(HttpError) as failure:
        mine.register(base, name)
    assert failure.value.status == 503 and "internal error" in failure.value.message
    assert base.call("GET", f"/kvedit/skills/{name}")["state"] == "failed"
    assert mine.ask(base, (hook, "compile")).report.get("composed", 0) == 0
    mine.register(base, name)
    assert_unharmed(base, mine, name)


def test_a_failing_command_is_an_error_for_its_caller_only(base: Server) -> None:
    mine = canary("rpc")
    base.fault("rpc")
    with pytest.raises(HttpError) as failure:
        mine.register(base)
    assert failure.value.status == 500
    name = mine.register(base)
    assert_unharmed(base, mine, name)


@pytest.mark.parametrize("hook", ["streamer", "report", "answer"])
def test_a_failing_report_costs_the_report_only(base: Server, hook: str) -> None:
    mine = canary(hook)
    name = mine.register(base)
    base.fault(hook)
    answer = base.generate(mine.prompt(hook), num_new=NUM_NEW)
    assert mine.answered(answer) and answer.report == {}
    assert_unharmed(base, mine, name)


def test_a_failing_epoch_still_parts_old_paths_from_new_ones(base: Server) -> None:
    """The host keeps its tree across a weight update without a flush; kvedit must not."""
    mine = canary("epoch")
    name = mine.register(base)
    prompt = mine.prompt("epoch")
    assert base.generate(prompt, num_new=NUM_NEW).report["composed"] > 200
    base.fault("epoch")
    update = {"model_path": str(default_model_dir()), "flush_cache": False}
    assert base.call("POST", "/update_weights_from_disk", update)["success"]
    after = base.generate(prompt, num_new=NUM_NEW)
    assert mine.answered(after) and after.report["composed"] == 0
    assert after.report["refused"] == [{"skill": name, "reason": "evicted"}]
    assert_unharmed(base, mine, name)


def test_a_question_without_its_skill_is_answered_differently(base: Server) -> None:
    """Control: the canary's answer does not come from the question."""
    mine, other = canary("control"), canary(("control", "other"))
    assert mine.password != other.password
    for skill in ([], other.skill):
        prompt = heading("control") + skill + question("control")
        assert not mine.answered(base.generate(prompt, num_new=NUM_NEW))
