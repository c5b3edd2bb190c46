"""The fields of a server from Python: ``client.fields``."""

from __future__ import annotations

from kvedit.client.transport import (
    Json,
    Namespace,
    Transport,
    flag,
    namespace_json,
    namespace_query,
)

Views = list[Json]  # in the class, `list` is a method


class FieldClient:
    """The field routes as methods. All raise the KvEditError the server answered, or NoServer."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def add(
        self,
        name: str,
        *,
        pattern: str,
        strategy: str | None = None,
        base: str | None = None,
        role: str | None = None,
        occurrence: int | None = None,
        within: int | None = None,
        anchor: str | None = None,
        template: str | None = None,
        cross_request: bool = False,
        namespace: Namespace = None,
        shared: bool = False,
        replace: bool = False,
    ) -> Json:
        """Declare a field (admin). ``pattern``: one line of text with one ``{value}``.

        Looked for in the ``occurrence``-th message of ``role`` (default: the first of "system"),
        or in the first ``within`` tokens of raw text. None leaves a setting to the server.
        Returns {"name", "field", "pattern", "strategy", "created", ...}.
        """
        where = {"role": role, "occurrence": occurrence, "within": within}
        where_given = {key: value for key, value in where.items() if value is not None}
        body: Json = {
            "name": name,
            "pattern": pattern,
            "strategy": strategy,
            "base": base,
            "where": where_given or None,
            "anchor": anchor,
            "template": template,
            "cross_request": cross_request,
            "namespace": namespace_json(namespace),
            "shared": shared,
            "replace": replace,
        }
        given = {key: value for key, value in body.items() if value is not None}
        answer: Json = self._transport.request("POST", "/kvedit/fields", {}, given)
        return answer

    def list(self, *, namespace: Namespace = None) -> Views:
        """The fields of a namespace and the shared ones."""
        query = namespace_query(namespace)
        answer: Json = self._transport.request("GET", "/kvedit/fields", query, None)
        fields: Views = answer["fields"]
        return fields

    def show(self, name: str, *, namespace: Namespace = None) -> Json:
        """One field of the namespace, else the shared one. Raises NotFound."""
        query = namespace_query(namespace)
        answer: Json = self._transport.request("GET", f"/kvedit/fields/{name}", query, None)
        return answer

    def remove(self, name: str, *, namespace: Namespace = None, shared: bool = False) -> Json:
        """Forget a field of exactly this namespace (admin). Raises NotFound."""
        query = {**namespace_query(namespace), "shared": flag(shared)}
        answer: Json = self._transport.request("DELETE", f"/kvedit/fields/{name}", query, None)
        return answer
