"""A program with an offline engine: ``engine_program.py MODEL_DIR RESULTS_FILE``.

Runs as a process of its own (an engine spawns its children by running the main module again) and
leaves what it saw as JSON for test_engine.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sglang_patches.cpu

sglang_patches.cpu.prepare()

OFF = {"custom_params": {"kvedit": {"splice": "off"}}}
SKILL_IDS = list(range(2_000, 2_300))
TAIL_IDS = list(range(900, 912))
TEXT = " ".join(["A parcel is paid back when it comes home within 14 days."] * 12)


def main(model_dir: str, results_file: str) -> None:
    import sglang

    import kvedit

    engine = sglang.Engine(
        model_path=model_dir,
        radix_cache_backend="kvedit",
        device="cpu",
        attention_backend="torch_native",
        max_total_tokens=8_000,
        chunked_prefill_size=2_048,
        random_seed=1,
    )
    try:
        seen = {"before": generate(engine, SKILL_IDS[:40])["meta_info"]}
        client = kvedit.Client(engine)
        seen |= skills(client) | answers(engine, client) | refusals(engine, client)
        seen |= fields(client)
        seen |= bos(engine, client) | {"audit": client.audit(), "status": client.status()}
    finally:
        engine.shutdown()
    Path(results_file).write_text(json.dumps(seen), "utf-8")


def generate(engine: Any, ids: list[int], num_new: int = 1, **fields: Any) -> Any:
    params = {"max_new_tokens": num_new, "temperature": 0, **fields.pop("sampling_params", {})}
    return engine.generate(input_ids=ids, sampling_params=params, **fields)


def error_of(call: Callable[[], Any]) -> dict[str, Any]:
    """What a call raised; {} when it did not."""
    try:
        call()
    except Exception as error:
        is_value_error = isinstance(error, ValueError)
        return {"type": type(error).__name__, "message": str(error), "value": is_value_error}
    return {}


def skills(client: Any) -> dict[str, Any]:
    first = client.register("text", text=TEXT)
    return {
        "first": first,
        "again": client.register("text", text=TEXT),
        "conflict": error_of(lambda: client.register("text", text=TEXT + " No.")),
        "second": client.register("text", text=TEXT + " No.", replace=True),
        "removed": client.remove("text", purge=True),
        "missing": error_of(lambda: client.show("text")),
        "bad_seam": error_of(lambda: client.register("s", text="a", seam=-1)),
        "bad_ids": error_of(lambda: client.register("s", input_ids=[1, 49_152])),
        "policy": client.register("policy", text=TEXT, namespace="tenant"),
        "listed": client.skills(namespace="tenant"),
        "listed_elsewhere": client.skills(),
        "tree": client.tree()["segments"],
    }


def fields(client: Any) -> dict[str, Any]:
    status = {"pattern": "status: {value}", "namespace": "fields"}
    refused = error_of(lambda: client.fields.add("status", **status))
    declared = client.fields.add("status", within=64, **status)
    return {
        "role_refused": refused,
        "field": declared,
        "fields": client.fields.list(namespace="fields"),
        "fields_elsewhere": client.fields.list(),
        "field_removed": client.fields.remove("status", namespace="fields"),
        "field_missing": error_of(lambda: client.fields.show("status", namespace="fields")),
    }


def answers(engine: Any, client: Any) -> dict[str, Any]:
    params = {"max_new_tokens": 3, "temperature": 0}
    prompt = "They ask for their money. " + TEXT + " So?"
    whole = engine.generate(prompt, params, cache_salt="tenant", rid="asked")
    asking = {**params, "custom_params": {"kvedit": {"report": True}}}
    stream = engine.generate(prompt, asking, cache_salt="tenant", stream=True)
    plain = engine.generate(prompt, params, cache_salt="tenant", stream=True)
    return {
        "whole": whole["meta_info"],
        "report": client.report("asked", namespace="tenant"),
        "report_elsewhere": error_of(lambda: client.report("asked")),
        "stream": [chunk["meta_info"] for chunk in stream],
        "plain_stream": [chunk["meta_info"] for chunk in plain],
        "elsewhere": engine.generate(prompt, params)["meta_info"],
    }


def refusals(engine: Any, client: Any) -> dict[str, Any]:
    unmet = {"custom_params": {"kvedit": {"splice": "require", "skills": ["nobody"]}}}
    return {
        "unmet": error_of(lambda: generate(engine, [5, 6], sampling_params=unmet)),
        "outside": error_of(lambda: generate(engine, [5, 49_152])),
        "lives": generate(engine, [5, 6])["output_ids"],
    }


def bos(engine: Any, client: Any) -> dict[str, Any]:
    """A skill right behind BOS, spliced, and the same path made by ordinary requests.

    Both arms find BOS and the skill cached and compute the tail in one chunk.
    """
    view = client.register("behind-bos", input_ids=SKILL_IDS, seam=0)
    prompt = [1, *SKILL_IDS, *TAIL_IDS]
    logprobs = {"num_new": 6, "return_logprob": True, "top_logprobs_num": 20}
    generate(engine, [1, 17])
    spliced = generate(engine, prompt, **logprobs)
    generate(engine, [1, *SKILL_IDS], sampling_params=OFF, cache_salt="exact")
    exact = generate(engine, prompt, sampling_params=OFF, cache_salt="exact", **logprobs)
    generate(engine, [1, 18, *SKILL_IDS], sampling_params=OFF, cache_salt="shifted")
    shifted_prompt = [1, 18, *SKILL_IDS, *TAIL_IDS]
    shifted = generate(
        engine, shifted_prompt, sampling_params=OFF, cache_salt="shifted", **logprobs
    )
    segment = [row for row in client.tree()["segments"] if row["name"] == "behind-bos"]
    return {
        "bos_skill": view,
        "bos_segment": segment[0],
        "bos_text_ids": engine.tokenizer_manager.tokenizer("a b").input_ids,
        "spliced": spliced,
        "exact": exact,
        "shifted": shifted,
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
