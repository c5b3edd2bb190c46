"""What one HTTP request's answer says of its prompts.

It hangs on the request itself, which the host hands to ``generate_request``. Nothing is looked up
by an id on the way to a client: clients choose ids, and one may guess another's.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import Any

from kvedit.namespace import namespace_tag
from kvedit.splice.token_classes import joined
from sglang_patches.guard import boundary
from sglang_patches.host.protocols import GenerateRequest, TokenizerManager
from sglang_patches.http.request.wishes import KEY, options_on_the_way
from sglang_patches.http.services.skill_service import service_of

Report = dict[str, Any]


@dataclass(slots=True)
class Answer:
    """One per HTTP request, filled while it is served.

    is_echo    the route repeats the prompt
    rid        the id that the request shall have; None: the client's or the host's
    namespace  whose prompts it has; None: of several, so nobody may read its report as a whole
    asked      whether a stream ends with its report: the options of a prompt say so
    """

    is_echo: bool = False
    rid: str | None = None
    namespace: str | None = None
    asked: bool = False
    _num_outputs: int = 0
    _num_samples: int = 1
    _reports: dict[int, Report] = field(default_factory=dict)  # by place among the outputs

    def begin(self, obj: GenerateRequest) -> None:
        """The host has split ``obj`` into prompts and samples. A request may generate again (tool
        calls inside the server do): the last time counts."""
        self._num_samples = max(1, obj.parallel_sample_num)  # the host takes n 0 as well
        self._num_outputs = 1 if obj.is_single else obj.batch_size * self._num_samples
        self._reports = {}
        self.namespace = _namespace(obj)
        self.asked = obj.stream and any(_asks(obj, item) for item in range(obj.batch_size))

    def item_of(self, place: int) -> int:
        """The prompt of the output at ``place``."""
        return place // self._num_samples

    def take(self, place: int, report: Report) -> None:
        self._reports[place] = report

    @property
    def is_complete(self) -> bool:
        return len(self._reports) == self._num_outputs

    def report(self) -> Report | None:
        """One report of all prompts by the first sample of each, as the host's usage counts them;
        None unless each has one."""
        firsts = range(0, self._num_outputs, self._num_samples)
        if not firsts or any(place not in self._reports for place in firsts):
            return None
        return joined([self._reports[place] for place in firsts])


def answer_of(request: Any) -> Answer:
    """The answer that hangs on ``request``; a loose one where no HTTP request stands behind."""
    from starlette.requests import Request

    if not isinstance(request, Request):
        return Answer()
    state: dict[str, Any] = request.scope.setdefault("state", {})  # the server's copy for this one
    answer: Answer = state.setdefault(KEY, Answer())
    return answer


async def answered(
    outputs: AsyncGenerator[Any, None],
    manager: TokenizerManager,
    obj: GenerateRequest,
    answer: Answer,
) -> AsyncGenerator[Any, None]:
    """``outputs`` of ``obj``, their reports noted in ``answer``.

    A report stays in an output that is a whole answer, and in the last one of a stream that asked
    for it; a server without reports shows none. An error here costs the report only.
    """
    shows = service_of(manager).config.reports
    has_begun = False
    async with aclosing(outputs):
        async for output in outputs:
            with boundary("answer", partial(_strip, output)):
                if not has_begun:
                    answer.begin(obj)
                    has_begun = True
                for place, one in _placed(output):
                    _note(answer, obj, place, one, shows)
            yield output


def _note(answer: Answer, obj: GenerateRequest, place: int, output: Any, shows: bool) -> None:
    reports = output["meta_info"].get(KEY)
    if not reports:
        return
    answer.take(place, reports[0])
    if not shows or (obj.stream and not _asks(obj, answer.item_of(place))):
        _strip(output)


def _asks(obj: GenerateRequest, item: int) -> bool:
    """Whether a stream of this prompt ends with its report: it was asked for, or it carries the
    token that the client wants."""
    options = options_on_the_way(obj, item)
    return options.report or options.sealed.is_issued


def _placed(output: Any) -> list[tuple[int, Any]]:
    if isinstance(output, list):
        return list(enumerate(output))
    return [(output.get("index", 0), output)]


def _strip(output: Any) -> None:
    for _, one in _placed(output):
        meta = one["meta_info"]
        meta.pop(KEY, None)
        for beam in meta.get("beam_results", ()):  # each has a copy of all that the request has
            beam["meta_info"].pop(KEY, None)


def _namespace(obj: GenerateRequest) -> str | None:
    """The one that all prompts of ``obj`` are in, or None. The host has turned empty strings into
    None by now, and one value for all prompts into a list."""
    salts, keys = (
        value if isinstance(value, list) else repeat(value, obj.batch_size)
        for value in (obj.cache_salt, obj.extra_key)
    )
    tags = {namespace_tag(salt, key, None) for salt, key in zip(salts, keys, strict=False)}
    return tags.pop() if len(tags) == 1 else None
