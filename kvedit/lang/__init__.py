"""Skills, fields and memories inside programs of SGLang's frontend language.

    import sglang as sgl
    from kvedit import lang

    backend = lang.Endpoint("http://127.0.0.1:30000")
    lang.register(backend, skills={"policy": text}, fields={"order_status": {
        "pattern": "order_status: {value}", "base": "unknown"}})

    @sgl.function
    def agent(s, status, profile, question):
        s += sgl.system(lang.field("order_status", status) + "\n" + lang.skill("policy"))
        s += sgl.user(lang.memory("profile-7", profile) + question)
        s += sgl.assistant(sgl.gen("answer", max_tokens=32))

    state = agent.run("sent", profile, "Where is it?", backend=backend)
    lang.report(state, "answer")  # {"exact", "composed", "derived", "computed", ...}

All three are text of the prompt and nothing else, so a program runs on any backend. What a server
with kvedit saves with them it finds by itself in the prompt's tokens.

``Endpoint`` instead of SGLang's ``RuntimeEndpoint``: SGLang chooses a chat template by the model's
path, and for a path it does not know writes plain ``SYSTEM:`` lines. A field that lives in the
system message (the default of ``where``) is only seen between the control tokens of the model's
own template. ``Endpoint`` reads the marks of that template from the server, so that a program's
prompt has the token ids of ``/v1/chat/completions``. On a ``RuntimeEndpoint`` skills work, and
fields whose ``where`` is ``{"within": N}`` do. ``Endpoint`` also registers memories, sets the
program's cache salt, and sends ``options`` along with a fork's and a select's own requests.

A field's earlier value is used where the earlier turn is proven to be the program's: give the
``Endpoint`` a ``cache_salt`` of its end user's own, and going on with the reply proves it. Without
a salt, send ``options(s, conversation=True)`` with the first turn and the token in its report
(``report(state, "answer")["conversation"]``) with the later ones.

Called by: programs. May touch: the client, a request's options, and of the host only what
``sglang_patches.frontend`` hands on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvedit.lang.functions import Registration, field, memory, options, register, report, skill

if TYPE_CHECKING:
    from sglang_patches.frontend.endpoint import Endpoint

__all__ = [
    "Endpoint",
    "Registration",
    "field",
    "memory",
    "options",
    "register",
    "report",
    "skill",
]


def __getattr__(name: str) -> Any:
    # Loaded on first use: this room imports nothing of the host at module level.
    if name == "Endpoint":
        from sglang_patches.frontend.endpoint import Endpoint

        return Endpoint
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
