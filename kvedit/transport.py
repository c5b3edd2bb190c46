"""How a client reaches the skills service: over HTTP, or inside the process of an Engine."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

from kvedit.errors import KvEditError, Unavailable, from_status

Json = dict[str, Any]
Query = Mapping[str, str]

# Statuses of the host that have no class of their own here.
_NEAREST = {401: 403, 405: 400, 413: 400}


class HttpTransport:
    def __init__(self, base_url: str, key: str | None, timeout_s: float) -> None:
        self._base_url = base_url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._timeout_s = timeout_s

    def request(self, method: str, path: str, query: Query, body: Json | None) -> Any:
        """The JSON answer. Raises the KvEditError that the answer stands for."""
        url = self._base_url + urllib.parse.quote(path)
        if query:
            url += "?" + urllib.parse.urlencode(query)
        data = None if body is None else json.dumps(body).encode()
        headers = {**self._headers, "Content-Type": "application/json"}
        request = urllib.request.Request(url, data=data, headers=headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            raise _answered(error) from None
        except (urllib.error.URLError, TimeoutError) as error:
            raise Unavailable(
                f"kvedit: {self._base_url}: expected a running server, got: {error}"
            ) from error


def _answered(error: urllib.error.HTTPError) -> KvEditError:
    text = error.read().decode("utf-8", "replace")
    try:
        message = str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):  # an answer of the host or of a proxy
        message = f"kvedit: HTTP {error.code}: {text[:200]}"
    return from_status(_NEAREST.get(error.code, error.code), message)


class EngineTransport:
    """Calls the service of an offline engine on the engine's own event loop."""

    def __init__(self, engine: Any) -> None:
        # Only this class needs the host's side, and only where an engine exists already.
        from sglang_patches.http.offline import Offline

        self._engine = engine
        self._offline = Offline(engine.tokenizer_manager)

    def request(self, method: str, path: str, query: Query, body: Json | None) -> Any:
        """The same answers and errors as over HTTP."""
        answer = self._offline.answer(method, path, dict(query), body)
        return self._engine.loop.run_until_complete(answer)
