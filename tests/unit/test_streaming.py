"""stream_generate against a scripted server: the first token's time, the last chunk, errors."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from kvedit.errors import BadRequest, KvEditError
from kvedit.workbench.timed_request import stream_generate

PAUSE_S = 0.3


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """Starts a server that answers one status and sends the given lines, PAUSE_S apart."""
    servers: list[HTTPServer] = []

    def start(status: int, lines: list[str]) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert json.loads(body)["stream"] is True
                options = json.loads(body)["sampling_params"]["custom_params"]["kvedit"]
                assert json.loads(options)["report"] is True
                self.send_response(status)
                self.end_headers()
                for line in lines:
                    time.sleep(PAUSE_S)
                    self.wfile.write(line.encode() + b"\n\n")
                    self.wfile.flush()

            def log_message(self, *args: Any) -> None:
                """Silent: pytest shows the test, not the traffic."""

        server = HTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def chunk(text: str, **meta: Any) -> str:
    return "data: " + json.dumps({"text": text, "output_ids": [1], "meta_info": meta})


def test_first_chunk_is_timed_and_the_last_one_kept(serve: Callable[..., str]) -> None:
    lines = [chunk("a"), chunk("ab", kvedit=[{"exact": 5}]), "data: [DONE]"]
    result = stream_generate(serve(200, lines), {"text": "x"})
    assert result.text == "ab"
    assert result.report == {"exact": 5}
    assert PAUSE_S <= result.ttft_s < result.total_s


def test_error_status_becomes_our_error(serve: Callable[..., str]) -> None:
    with pytest.raises(BadRequest, match="too long"):
        stream_generate(serve(400, ["too long"]), {})


def test_error_inside_the_stream_becomes_our_error(serve: Callable[..., str]) -> None:
    line = "data: " + json.dumps({"error": {"message": "bad seam", "code": 400}})
    with pytest.raises(BadRequest, match="bad seam"):
        stream_generate(serve(200, [line, "data: [DONE]"]), {})


def test_empty_stream_is_an_error(serve: Callable[..., str]) -> None:
    with pytest.raises(KvEditError, match="at least one chunk"):
        stream_generate(serve(200, ["data: [DONE]"]), {})
