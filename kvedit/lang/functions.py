"""The functions of `kvedit.lang`, and what names stand for in this process."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Any

from kvedit.checks import check_name
from kvedit.client.transport import Json, NoServer
from kvedit.errors import BadRequest, Forbidden, NotFound
from kvedit.fields.declaration import VALUE, text_problem
from kvedit.request.options import parse_options

# A memory is looked for in each prompt until its text is known to the server; these many last.
MAX_MEMORIES = 1024


class Library:
    """The texts that names stand for in this process. Programs run in threads, so it locks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._skills: dict[str, str] = {}
        self._patterns: dict[str, str] = {}
        self._memories: OrderedDict[str, str] = OrderedDict()

    def add_skill(self, name: str, text: str) -> None:
        """``name`` stands for ``text`` from now on."""
        with self._lock:
            self._skills[name] = text

    def add_pattern(self, name: str, pattern: str) -> None:
        """The field ``name`` has ``pattern``, with one {value}, from now on."""
        with self._lock:
            self._patterns[name] = pattern

    def add_memory(self, name: str, text: str) -> None:
        """The present text of a memory; of more than MAX_MEMORIES the oldest goes."""
        with self._lock:
            self._memories[name] = text
            self._memories.move_to_end(name)
            while len(self._memories) > MAX_MEMORIES:
                self._memories.popitem(last=False)

    def skill(self, name: str) -> str:
        """Its text. Raises NotFound for a name that was not given to ``register``."""
        return self._known("skill", self._skills, name)

    def pattern(self, name: str) -> str:
        """The field's pattern. Raises NotFound for a name that was not given to ``register``."""
        return self._known("field", self._patterns, name)

    def memories_in(self, prompt: str, known: Mapping[str, str]) -> dict[str, str]:
        """Memories whose text stands in ``prompt`` and is not the one in ``known``, by name."""
        with self._lock:
            changed = [(n, t) for n, t in self._memories.items() if known.get(n) != t]
        return {name: text for name, text in changed if text in prompt}

    def _known(self, what: str, texts: Mapping[str, str], name: str) -> str:
        with self._lock:
            text = texts.get(name)
        if text is None:
            raise NotFound(f"kvedit: {what} {name!r}: expected one given to register, got none")
        return text


LIBRARY = Library()


@dataclass(frozen=True, slots=True)
class Registration:
    """What a server took: its views by name, and why it took nothing of the others.

    A name in ``refused`` is plain text to the server; programs that use it run all the same.
    """

    skills: dict[str, Json] = dataclass_field(default_factory=dict)
    fields: dict[str, Json] = dataclass_field(default_factory=dict)
    refused: dict[str, str] = dataclass_field(default_factory=dict)


def skill(name: str) -> Any:
    """The text registered under ``name``, as an expression. Raises NotFound."""
    return _constant(LIBRARY.skill(name))


def field(name: str, value: Any) -> Any:
    """The field's pattern with ``value`` in it, as an expression.

    ``value``: anything with a text of one line, or an expression (``sgl.gen``, an argument that is
    being traced). End the line behind it, unless the pattern goes on there. Raises NotFound for a
    field that was not given to ``register``, BadRequest for a value that would not be one.
    """
    front, _, back = LIBRARY.pattern(name).partition(VALUE)
    if _is_expression(value):
        return _constant(front) + value + _constant(back)
    text = str(value)
    problem = text_problem(text)
    if problem is not None:
        raise BadRequest(
            f"kvedit: field {name!r}: expected one line of text, got {text[:40]!r} ({problem})"
        )
    return _constant(front + text + back)


def memory(name: str, text: str) -> Any:
    """A skill whose text may change, as an expression of ``text``.

    The first request of an ``Endpoint`` that holds a new text compiles it, and only it, as the next
    version of ``name``. A name has one text at a time, so every user's memory needs a name of its
    own. Ends best in a newline, as every skill. Raises BadRequest.
    """
    if not isinstance(text, str) or not text.strip():
        raise BadRequest(f"kvedit: memory {name!r}: expected a text, got {str(text)[:40]!r}")
    LIBRARY.add_memory(check_name(name), text)
    return _constant(text)


def register(
    backend: Any,
    skills: Mapping[str, str] | None = None,
    fields: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    shared: bool = False,
    pin: bool = False,
    replace: bool = False,
) -> Registration:
    """Give texts and patterns their names, and have the server behind ``backend`` compile them.

    ``skills``: name -> text. ``fields``: name -> declaration (``POST /kvedit/fields`` without the
    name). ``backend``: any backend of the frontend language, or None; one that is no SGLang server
    with kvedit, or that gives this client no right to register, leaves them plain text and says so
    in ``refused``. ``shared``, ``pin``, ``replace``: as for ``kvedit.Client``. Raises BadRequest
    and the other errors of the server.
    """
    skills, fields = skills or {}, fields or {}
    for name, text in skills.items():
        LIBRARY.add_skill(check_name(name), text)
    for name, declaration in fields.items():
        LIBRARY.add_pattern(check_name(name), _pattern_of(name, declaration))
    done = Registration()
    service = _service_of(backend)
    if service is None:
        return done
    for name, text in skills.items():
        body = {"text": text, "shared": shared, "pin": pin, "replace": replace}
        _post(service, "skills", name, body, done.skills, done.refused)
    for name, declaration in fields.items():
        body = {**declaration, "shared": shared}
        body |= {"replace": True} if replace else {}
        _post(service, "fields", name, body, done.fields, done.refused)
    return done


def options(s: Any, **wanted: Any) -> None:
    """Send ``custom_params.kvedit`` with the generations that follow in the program state ``s``,
    and on an ``Endpoint`` with the requests of a fork and of a select too.

    ``wanted``: the keys of a request's options (``splice``, ``edits``, ``strategy``, ...), in place
    of those set before; none takes them back. Waits for what ``s`` was told already. Forks made
    afterwards inherit them; other backends than SGLang servers ignore them. Raises BadRequest.
    """
    parse_options(wanted)
    from sglang_patches.frontend import endpoint as host

    host.set_options(s, wanted)


def report(s: Any, variable: str) -> Json | None:
    """The token classes of the request that made ``variable`` (``meta_info["kvedit"]``).

    None on a backend without kvedit, from a server that keeps reports out of its answers, and from
    one where nothing is registered when the program sets no options: nothing of ours touches such
    a request. Raises NotFound when that request failed or was never made.
    """
    meta: Json | None = s.get_meta_info(variable)
    if meta is None:
        raise NotFound(
            f"kvedit: report of {variable!r}: expected a finished generation, "
            f"got {s.error() or 'none of this name'}"
        )
    reports = meta.get("kvedit")
    return reports[0] if reports else None


def _post(
    service: Any, kind: str, name: str, body: Json, taken: dict[str, Json], refused: dict[str, str]
) -> None:
    try:
        taken[name] = service.post(kind, {"name": name, **body})
    except (Forbidden, NoServer) as error:
        refused[name] = str(error)


def _pattern_of(name: str, declaration: Mapping[str, Any]) -> str:
    pattern = declaration.get("pattern")
    if not isinstance(pattern, str) or pattern.count(VALUE) != 1:
        raise BadRequest(
            f"kvedit: field {name!r}: pattern: expected text with one {VALUE}, got {pattern!r:.80}"
        )
    return pattern


def _service_of(backend: Any) -> Any:
    from sglang_patches.frontend import endpoint as host

    return host.service_of(backend)


def _constant(text: str) -> Any:
    from sglang_patches.frontend import endpoint as host

    return host.constant(text)


def _is_expression(value: Any) -> bool:
    from sglang_patches.frontend import endpoint as host

    return bool(host.is_expression(value))
