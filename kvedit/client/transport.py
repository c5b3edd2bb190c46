"""How a client reaches the skills service: over HTTP, or inside the process of an Engine."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any, Protocol

from kvedit.errors import BadRequest, KvEditError, Unavailable, from_status

Json = dict[str, Any]
Query = Mapping[str, str]
Namespace = str | Mapping[str, str | None] | None

# Statuses of the host that have no class of their own here.
_NEAREST = {401: 403, 405: 400, 413: 400}


class Transport(Protocol):
    """One request to a route; gives the JSON answer, or raises the KvEditError that it is."""

    def request(self, method: str, path: str, query: Query, body: Json | None) -> Any: ...


class NoServer(Unavailable):
    """Nothing at that address answered as a server with kvedit does."""


class HttpTransport:
    """Raises BadRequest for a ``base_url`` that is no http(s) URL."""

    def __init__(self, base_url: str, key: str | None, timeout_s: float) -> None:
        self._base_url = check_url(base_url).rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._timeout_s = timeout_s

    def request(self, method: str, path: str, query: Query, body: Json | None) -> Any:
        """The JSON answer. Raises the KvEditError that the answer stands for, or NoServer."""
        url = self._base_url + urllib.parse.quote(path)
        if query:
            url += "?" + urllib.parse.urlencode(query)
        data = None if body is None else json.dumps(body).encode()
        headers = {**self._headers, "Content-Type": "application/json"}
        request = urllib.request.Request(url, data=data, headers=headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as response:
                answer = response.read()
        except urllib.error.HTTPError as error:
            raise self._answered(error) from None
        except (OSError, http.client.HTTPException) as error:  # URLError is an OSError
            raise self._no_server(_reason(error)) from error
        try:
            return json.loads(answer)
        except ValueError:
            raise self._no_server(f"an answer that is no JSON: {_start_of(answer)}") from None

    def _answered(self, error: urllib.error.HTTPError) -> KvEditError:
        try:
            answer = error.read()
        except (OSError, http.client.HTTPException) as broken:
            return self._no_server(_reason(broken))
        try:
            message = str(json.loads(answer)["error"]["message"])
        except (ValueError, KeyError, TypeError):  # an answer of the host or of a proxy
            if error.code == 404:
                return self._no_server(f"HTTP 404 ({self._hint()})")
            message = f"kvedit: {self._base_url}: HTTP {error.code}: {_start_of(answer)}"
        return from_status(_NEAREST.get(error.code, error.code), message)

    def _hint(self) -> str:
        path = urllib.parse.urlsplit(self._base_url).path
        if path:
            return f"the URL ends in {path!r}, the routes of kvedit start at the root"
        return "this server runs without kvedit"

    def _no_server(self, reason: str) -> NoServer:
        return NoServer(
            f"kvedit: {self._base_url}: expected a running server with kvedit, got {reason}"
        )


def check_url(url: str) -> str:
    """``url``, when it has the scheme http or https, a host and at most a valid port.

    Raises BadRequest.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        is_base = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is no number, or an IPv6 address is not closed
        is_base = False
    if not is_base or any(char.isspace() for char in url):
        raise BadRequest(f"kvedit: url: expected http://HOST:PORT, got {url!r}")
    return url


def _reason(error: Exception) -> str:
    """What went wrong on the way, in words: no class names, no numbers of the system."""
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, Exception):
        return _reason(error.reason)
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, http.client.RemoteDisconnected):
        return "a closed connection"
    if isinstance(error, http.client.HTTPException):
        return "an answer that is not HTTP"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error) or type(error).__name__


def _start_of(answer: bytes) -> str:
    return " ".join(answer.decode("utf-8", "replace").split())[:200] or "(empty)"


class EngineTransport:
    """Calls the service of an offline engine on the engine's own event loop."""

    def __init__(self, engine: Any) -> None:
        # Of this room only this class needs the host's side, and an engine exists already here.
        from sglang_patches.http.admin.offline import Offline

        self._engine = engine
        self._offline = Offline(engine.tokenizer_manager, engine.template_manager)

    def request(self, method: str, path: str, query: Query, body: Json | None) -> Any:
        """The same answers and errors as over HTTP."""
        answer = self._offline.answer(method, path, dict(query), body)
        return self._engine.loop.run_until_complete(answer)


def namespace_query(namespace: Namespace) -> Query:
    """A namespace as the query of a route spells it."""
    if namespace is None:
        return {}
    if isinstance(namespace, str):
        return {"cache_salt": namespace}
    return {key: value for key, value in namespace.items() if value is not None}


def namespace_json(namespace: Namespace) -> Any:
    """A namespace as a body spells it; None is left out."""
    return dict(namespace) if isinstance(namespace, Mapping) else namespace


def flag(value: bool) -> str:
    """A flag as the query of a route spells it."""
    return "1" if value else "0"
