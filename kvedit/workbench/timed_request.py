"""One /generate request, streamed and timed: what the demo and the benches measure with."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from kvedit.errors import from_status

REQUEST_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Streamed:
    """ttft_s: seconds from sending to the first chunk of the stream; total_s: to its end.
    text, output_ids, meta_info: as in the last chunk."""

    ttft_s: float
    total_s: float
    text: str
    output_ids: list[int]
    meta_info: dict[str, Any]

    @property
    def report(self) -> dict[str, Any]:
        """The request's token classes. Raises KeyError when the server runs without kvedit."""
        report: dict[str, Any] = self.meta_info["kvedit"][0]
        return report


def stream_generate(url: str, body: Mapping[str, Any]) -> Streamed:
    """POST `body` to `url`/generate with stream on and time it; its last event shall have a report.

    Raises KvEditError for an error answer, also one inside the stream, and for an empty stream.
    """
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(
        parts.hostname or "", parts.port, timeout=REQUEST_TIMEOUT_S
    )
    payload = json.dumps({**with_report(body), "stream": True})
    try:
        connection.connect()
        started = time.perf_counter()
        connection.request("POST", "/generate", payload, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise from_status(response.status, response.read().decode("utf-8", "replace"))
        return _timed(response, started)
    finally:
        connection.close()


def with_report(body: Mapping[str, Any]) -> dict[str, Any]:
    """`body` with the option that makes a stream end with its report."""
    sampling = body.get("sampling_params") or {}
    custom = sampling.get("custom_params") or {}
    options = {**custom.get("kvedit", {}), "report": True}
    custom = {**custom, "kvedit": json.dumps(options)}
    return {**body, "sampling_params": {**sampling, "custom_params": custom}}


def _timed(response: http.client.HTTPResponse, started: float) -> Streamed:
    ttft_s = 0.0
    last: dict[str, Any] = {}
    for last in _chunks(response):
        if "error" in last:
            raise from_status(last["error"].get("code", 500), last["error"]["message"])
        ttft_s = ttft_s or time.perf_counter() - started
    if not last:
        raise from_status(500, "kvedit: /generate: expected at least one chunk, got none")
    return Streamed(
        ttft_s=ttft_s,
        total_s=time.perf_counter() - started,
        text=last["text"],
        output_ids=last["output_ids"],
        meta_info=last["meta_info"],
    )


def _chunks(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON objects of a server-sent event stream, until its [DONE]."""
    for line in response:
        if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
            yield json.loads(line[len(b"data: ") :])
