"""kvedit.Client against addresses where no kvedit answers: each says what it met, in words."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator

import pytest

import kvedit
from kvedit.client.transport import NoServer
from kvedit.errors import BadRequest, Forbidden, KvEditError, NotFound

Answering = Callable[[bytes | None], str]


@pytest.fixture
def answering() -> Iterator[Answering]:
    """answering(bytes) -> URL of a service that sends them to one client; None resets it."""
    listeners: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def start(answer: bytes | None) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                if answer is None:  # linger of 0 s: closing sends a reset
                    reset = struct.pack("ii", 1, 0)
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
                else:
                    connection.sendall(answer)

        threads.append(threading.Thread(target=serve))
        threads[-1].start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for thread in threads:
        thread.join()
    for listener in listeners:
        listener.close()


def http(status: str, body: str) -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()


def refusal(url: str) -> KvEditError:
    with pytest.raises(KvEditError) as refused:
        kvedit.Client(url, timeout_s=30).status()
    return refused.value


@pytest.mark.parametrize(
    ("answer", "got"),
    [
        (None, "connection reset by peer"),
        (b"", "a closed connection"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "an answer that is not HTTP"),
        (http("200 OK", "<html>hello</html>"), "an answer that is no JSON: <html>hello</html>"),
        (http("404 Not Found", '{"detail":"Not Found"}'), "HTTP 404 (this server runs without"),
    ],
)
def test_a_service_that_is_no_kvedit_server_is_named_with_what_it_did(
    answering: Answering, answer: bytes | None, got: str
) -> None:
    url = answering(answer)
    error = refusal(url)
    assert isinstance(error, NoServer)
    assert str(error).startswith(f"kvedit: {url}: expected a running server with kvedit, got {got}")


def test_a_refused_connection_is_said_in_words() -> None:
    assert str(refusal("http://127.0.0.1:9")).endswith("with kvedit, got connection refused")


def test_a_404_below_a_path_points_at_the_path(answering: Answering) -> None:
    url = answering(http("404 Not Found", '{"detail":"Not Found"}')) + "/v1"
    assert "the URL ends in '/v1'" in str(refusal(url))


@pytest.mark.parametrize(
    ("status", "body", "kind", "says"),
    [
        ("404 Not Found", '{"error":{"message":"kvedit: skill x"}}', NotFound, "kvedit: skill x"),
        ("401 Unauthorized", '{"error":"Unauthorized"}', Forbidden, "HTTP 401"),
        ("502 Bad Gateway", "<html>", KvEditError, "HTTP 502: <html>"),
    ],
)
def test_an_answer_with_a_status_of_its_own_keeps_it(
    answering: Answering, status: str, body: str, kind: type[KvEditError], says: str
) -> None:
    error = refusal(answering(http(status, body)))
    assert type(error) is kind and says in str(error)


@pytest.mark.parametrize(
    "url",
    ["nonsense", "127.0.0.1:30000", "ftp://host", "http://", "http://h:port", "http://h:1 2", ""],
)
def test_what_is_no_http_url_is_refused_at_once(url: str) -> None:
    with pytest.raises(BadRequest, match=r"kvedit: url: expected http://HOST:PORT, got '"):
        kvedit.Client(url)
