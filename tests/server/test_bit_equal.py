"""Splices next to exact reuse, bit for bit, and no taint of exact traffic.

Bit-equal means: same cached length, same chunk boundaries, batch of one, every top-k logprob the
same number. Two runs are brought there by a fresh extra_key, so that nothing else is cached.
"""

from __future__ import annotations

import pytest

from tests.server.harness import (
    BASE,
    PAGED,
    PAGED_SMALL_CHUNK,
    SMALL_CHUNK,
    Answer,
    Server,
    ServerConfig,
    ServerPool,
    fresh_name,
    random_ids,
)

pytestmark = pytest.mark.real_server

CONFIGS = pytest.mark.parametrize(
    "config", [BASE, SMALL_CHUNK, PAGED, PAGED_SMALL_CHUNK], ids=["p1", "p1c", "p16", "p16c"]
)


def assert_same(left: Answer, right: Answer) -> None:
    assert left.token_ids == right.token_ids
    assert left.top_logprobs == right.top_logprobs


@CONFIGS
def test_skill_at_the_start_equals_exact_reuse(servers: ServerPool, config: ServerConfig) -> None:
    """Nothing in front and no seam: the spliced KV is the KV of an ordinary prefill."""
    server = servers.get(config)
    skill, tail = random_ids(("bit", config.page_size, config.chunk), 592), random_ids("bt", 9)
    server.add_skill(fresh_name(), skill)
    spliced = server.generate(skill + tail, num_new=8, top=20, kvedit={"seam": 0}, extra_key=None)
    assert spliced.report["composed"] == 592
    key = fresh_name()
    server.generate(skill, kvedit={"splice": "off"}, extra_key=key)  # compiled alone, as skills are
    exact = server.generate(
        skill + tail, num_new=8, top=20, kvedit={"splice": "off"}, extra_key=key
    )
    assert exact.report["exact"] == spliced.report["composed"]
    assert_same(spliced, exact)


@CONFIGS
def test_a_plain_request_after_splices_equals_a_clean_namespace(
    servers: ServerPool, config: ServerConfig
) -> None:
    """The same prefix, served plainly after a splice stood on it, and in a namespace that never
    saw a splice: the same cached length and the same numbers."""
    server = servers.get(config)
    head = random_ids(("taint", config.page_size, config.chunk), 96)
    skill, tail = random_ids(("taint-s", config.page_size, config.chunk), 400), [11, 12, 13]
    server.add_skill(fresh_name(), skill)
    clean = fresh_name()
    for key in (None, clean):
        server.generate(head, kvedit={"splice": "off"}, extra_key=key)
    # The splice recomputes its 16 seam tokens behind the real prefix: exact KV, and cached so.
    server.generate(head + skill[:16], kvedit={"splice": "off"}, extra_key=clean)
    spliced = server.generate(head + skill + tail, num_new=4)
    assert spliced.report["composed"] > 300
    server.generate(head + skill + tail, num_new=4)
    plain = server.generate(head + skill + tail, num_new=6, top=20, kvedit={"splice": "off"})
    other = server.generate(
        head + skill + tail, num_new=6, top=20, kvedit={"splice": "off"}, extra_key=clean
    )
    assert plain.cached_tokens == other.cached_tokens == 96 + 16
    assert plain.report["composed"] == plain.report["derived"] == 0
    assert_same(plain, other)


def test_repeat_of_a_splice_equals_itself(base: Server) -> None:
    head, skill, tail = random_ids("rep-h", 50), random_ids("rep-s", 400), random_ids("rep-t", 12)
    base.add_skill(fresh_name(), skill)
    prompt = head + skill + tail
    base.generate(prompt)
    first = base.generate(prompt, num_new=6, top=10)
    second = base.generate(prompt, num_new=6, top=10)
    assert first.split == second.split
    assert first.report["computed"] == 1
    assert_same(first, second)


def test_a_namespace_never_hits_anothers_splice(base: Server) -> None:
    skill, prompt_tail = random_ids("ns-s", 300), [21, 22]
    base.add_skill(fresh_name(), skill)
    head = random_ids("ns-h", 40)
    mine = base.generate(head + skill + prompt_tail)
    assert mine.report["composed"] > 0
    for fields in ({"extra_key": fresh_name()}, {"cache_salt": fresh_name()}):
        other = base.generate(head + skill + prompt_tail, **fields)
        assert other.split == (0, 0, 0, len(head) + 302)
