"""kvedit from Python: a running server by its URL, or an offline ``sglang.Engine``.

client = kvedit.Client("http://127.0.0.1:30000", admin_api_key=KEY)
client.register("policy", text=open("policy.md").read())
client.fields.add("order_status", pattern="order_status: {value}")
client.status()
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvedit.client.fields import FieldClient
from kvedit.client.transport import (
    EngineTransport,
    HttpTransport,
    Json,
    Namespace,
    Transport,
    flag,
    namespace_json,
    namespace_query,
)


class Client:
    """The /kvedit routes of a server as methods (but for the one of tests), those of fields under
    ``fields``. All raise the KvEditError the server answered, or NoServer.

    ``target``: a base URL, or an ``sglang.Engine`` (which needs no keys: its owner is the admin).
    ``timeout_s`` bounds one HTTP request; a registration waits for its compile.
    """

    def __init__(
        self,
        target: Any,
        api_key: str | None = None,
        admin_api_key: str | None = None,
        *,
        timeout_s: float = 600.0,
    ) -> None:
        self._transport: Transport
        if isinstance(target, str):
            self._transport = HttpTransport(target, admin_api_key or api_key, timeout_s)
        else:
            self._transport = EngineTransport(target)
        self.fields = FieldClient(self._transport)

    def register(
        self,
        name: str,
        *,
        text: str | None = None,
        input_ids: Sequence[int] | None = None,
        namespace: Namespace = None,
        shared: bool = False,
        pin: bool = False,
        seam: int | None = None,
        replace: bool = False,
        memory: bool = False,
    ) -> Json:
        """Compile ``text`` or ``input_ids`` under ``name`` and wait until it is ready.

        ``namespace``: a cache salt, or {"cache_salt", "extra_key"}; None is the default one.
        ``seam``: tokens recomputed at the front of each splice; None is the server's default.
        ``memory``: the text may hold declared fields; it is replaced as a whole when it changes.
        Returns {"name", "id", "version", "num_tokens", "state", ...}.
        """
        body: Json = {
            "name": name,
            "text": text,
            "input_ids": None if input_ids is None else list(input_ids),
            "namespace": namespace_json(namespace),
            "shared": shared,
            "pin": pin,
            "seam": seam,
            "replace": replace,
            "memory": memory,
        }
        given = {key: value for key, value in body.items() if value is not None}
        answer: Json = self._transport.request("POST", "/kvedit/skills", {}, given)
        return answer

    def skills(self, *, namespace: Namespace = None, everything: bool = False) -> list[Json]:
        """The skills of a namespace and the shared ones; ``everything``: all (admin)."""
        answer: Json = self._get("/kvedit/skills", namespace, all="1" if everything else "0")
        skills: list[Json] = answer["skills"]
        return skills

    def show(self, name: str, *, namespace: Namespace = None) -> Json:
        """One skill. Raises NotFound."""
        answer: Json = self._get(f"/kvedit/skills/{name}", namespace)
        return answer

    def remove(
        self,
        name: str,
        *,
        namespace: Namespace = None,
        shared: bool = False,
        purge: bool = False,
    ) -> Json:
        """Retire a skill; ``purge`` also drops the cached paths of running conversations."""
        query = {**namespace_query(namespace), "shared": flag(shared), "purge": flag(purge)}
        answer: Json = self._transport.request("DELETE", f"/kvedit/skills/{name}", query, None)
        return answer

    def status(self) -> Json:
        """{"skills": {state: count}, "counters", "pool", "weight_epoch", "events", ...}."""
        answer: Json = self._get("/kvedit/status", None)
        return answer

    def report(self, request_id: str, *, namespace: Namespace = None) -> Json:
        """The token classes of a recent request: {"exact", "composed", "derived", ...}."""
        answer: Json = self._get(f"/kvedit/requests/{request_id}", namespace)
        return answer

    def tree(self) -> Json:
        """{"segments"}: the skills of all namespaces, by segment number (admin)."""
        answer: Json = self._get("/kvedit/tree", None)
        return answer

    def audit(self) -> Json:
        """{"ok", "problems"}: whether every slot of the pool has exactly one owner (admin)."""
        answer: Json = self._get("/kvedit/audit", None)
        return answer

    def _get(self, path: str, namespace: Namespace, **query: str) -> Any:
        return self._transport.request("GET", path, {**namespace_query(namespace), **query}, None)
