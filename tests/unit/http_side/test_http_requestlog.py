"""The host's request log names no conversation, whatever form the options come in."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from sglang.srt.utils.request_logger import RequestLogger

from sglang_patches.http.request.conversation import digest_of
from sglang_patches.http.request.request_log import REFUSED, log_received

TOKEN = "kvc-" + "5e" * 16
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


class Lines:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def info(self, line: str) -> None:
        self.lines.append(line)


def logged(obj: Any, form: str, *, by_hook: bool = True) -> str:
    """The line that the host's own logger writes of ``obj``."""
    logger = RequestLogger(True, 2, form, None)
    target = Lines()
    logger.targets = [target]  # type: ignore[list-item]
    original = RequestLogger.log_openai_received_request
    if by_hook:
        log_received(original, logger, obj, request=None)
    else:
        original(logger, obj, request=None)
    [line] = target.lines
    return line


def requests(options: Any) -> list[Any]:
    custom = {"mine": "stays", "kvedit": options}
    return [
        ChatCompletionRequest(**CHAT, custom_params=custom),
        CompletionRequest(model="m", prompt="hi", custom_params=custom),
    ]


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize("as_text", [False, True])
def test_a_conversation_is_logged_by_its_digest(form: str, as_text: bool) -> None:
    options: Any = {"conversation": TOKEN, "report": True}
    for obj in requests(json.dumps(options) if as_text else options):
        before = obj.model_dump()
        assert TOKEN in logged(obj, form, by_hook=False), "the host alone would log it"
        line = logged(obj, form)
        assert TOKEN not in line and digest_of(TOKEN) in line
        assert "stays" in line and "report" in line
        assert obj.model_dump() == before, "the request goes on as it came"


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize(
    "options",
    [
        TOKEN,
        json.dumps(TOKEN),
        '{"conversation": "' + TOKEN + '",}',
        {"conversation": [TOKEN]},
        {"conversations": TOKEN},
        {TOKEN: True},
        [{"conversation": TOKEN}],
    ],
)
def test_of_options_that_are_refused_nothing_is_logged(form: str, options: Any) -> None:
    for obj in requests(options):
        line = logged(obj, form)
        assert TOKEN not in line and REFUSED in line and "stays" in line


@pytest.mark.parametrize("custom", [None, {}, {"mine": 1}, {"kvedit": {"conversation": True}}])
def test_everything_else_is_logged_as_the_host_does(custom: Any) -> None:
    obj = ChatCompletionRequest(**CHAT, custom_params=custom)
    assert logged(obj, "text") == logged(obj, "text", by_hook=False)
