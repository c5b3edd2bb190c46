"""How a command and its answer travel: as text in two strings that the host passes on unread.

A nonce ties an answer to its question; a version makes two processes that were not installed
together refuse each other in words.
"""

from __future__ import annotations

from array import array
from typing import Any, TypeVar

import msgspec

from kvedit.errors import BadRequest, KvEditError, Unavailable, from_status
from kvedit.wire.commands import AnyCommand, Command

VERSION = 1
PREFIX = "kvedit:"
KEY = "kvedit"  # of the host's answer, which is an object: where ours stands
NOTHING = msgspec.Raw(b"null")
A = TypeVar("A")


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """command: still encoded, so that a nonce is known even where it cannot be read."""

    version: int
    nonce: str
    command: msgspec.Raw


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A KvEditError on its way."""

    status: int
    message: str


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """Its ``answer``, or the ``failure`` that came instead."""

    version: int
    nonce: str
    answer: msgspec.Raw = NOTHING
    failure: Failure | None = None


def is_command(text: object) -> bool:
    """Whether ``seal`` may have made it: it has the prefix."""
    return isinstance(text, str) and text.startswith(PREFIX)


def seal(command: Command[Any], nonce: str) -> str:
    """A command as text."""
    envelope = Envelope(version=VERSION, nonce=nonce, command=msgspec.Raw(_encode(command)))
    return PREFIX + _encode(envelope).decode()


def unseal(text: str) -> Envelope:
    """Raises BadRequest for what ``seal`` does not make."""
    try:
        return msgspec.json.decode(text.removeprefix(PREFIX), type=Envelope)
    except msgspec.MsgspecError as error:
        raise BadRequest(f"kvedit: command: expected an envelope, got: {error}") from None


def command_in(envelope: Envelope) -> AnyCommand:
    """Raises BadRequest for another version, and for what is no command."""
    _check_version(envelope.version)
    try:
        command: AnyCommand = _COMMANDS.decode(envelope.command)
    except msgspec.MsgspecError as error:
        raise BadRequest(f"kvedit: command: expected a known one, got: {error}") from None
    return command


def reply(nonce: str, answer: object) -> str:
    """An answer as text: a struct, or a KvEditError."""
    if isinstance(answer, KvEditError):
        failure = Failure(status=answer.status, message=str(answer))
        return _encode(Reply(version=VERSION, nonce=nonce, failure=failure)).decode()
    raw = msgspec.Raw(_encode(answer))
    return _encode(Reply(version=VERSION, nonce=nonce, answer=raw)).decode()


def answer_in(text: object, nonce: str, command: Command[A]) -> A:
    """The answer to ``command``. Raises the KvEditError that it is, and Unavailable for whatever
    does not answer this very command."""
    try:
        found = msgspec.json.decode(text if isinstance(text, str) else "", type=Reply)
    except msgspec.MsgspecError:
        found = None
    if found is None or found.nonce != nonce:
        raise Unavailable(
            f"kvedit: {command.op}: expected the scheduler's answer, got a stranger's"
        )
    _check_version(found.version)
    if found.failure is not None:
        raise from_status(found.failure.status, found.failure.message)
    return msgspec.json.decode(found.answer, type=command.answer_type())


def _check_version(version: int) -> None:
    if version != VERSION:
        raise BadRequest(
            f"kvedit: command: expected version {VERSION}, got {version}: "
            "the server's processes run different installations"
        )


def _encode(value: object) -> bytes:
    return msgspec.json.encode(value, enc_hook=_plain)


def _plain(value: object) -> object:
    if isinstance(value, array):
        return value.tolist()
    raise TypeError(f"kvedit: command: expected plain data, got {type(value).__name__}")


def _ids(kind: Any, value: Any) -> array[int]:
    """The only type of ours that msgspec does not know: token ids."""
    return array("q", value)


_COMMANDS: msgspec.json.Decoder[AnyCommand] = msgspec.json.Decoder(AnyCommand, dec_hook=_ids)
