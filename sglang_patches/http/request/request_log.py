"""The host's log of OpenAI requests as they came: without the names and tokens of conversations."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from kvedit.errors import BadRequest
from kvedit.request.options import parse_options
from sglang_patches.http.request.conversation import digest_of
from sglang_patches.http.request.wishes import KEY

REFUSED = "<options that are refused>"


def log_received(original: Callable[..., None], logger: Any, obj: Any, request: Any = None) -> None:
    """AROUND ``RequestLogger.log_openai_received_request``, which runs before our intake does.

    A request without our key is logged as it is. The request itself never changes: the host
    serves it after it has logged it.
    """
    custom = getattr(obj, "custom_params", None)  # not every route's request has the field
    if isinstance(custom, dict) and KEY in custom:
        obj = obj.model_dump(exclude_none=True)  # as the host dumps it
        obj["custom_params"] = {**custom, KEY: _shown(custom[KEY])}
    original(logger, obj, request=request)


def _shown(value: Any) -> Any:
    """The options as the scheduler will get them: a digest in place of the conversation. What is
    no valid options may have a token anywhere, so nothing of it is shown."""
    try:
        said = parse_options(value)
    except BadRequest:
        return REFUSED
    if not isinstance(said.conversation, str):
        return value
    given = json.loads(value) if isinstance(value, str) else value
    return {**given, "conversation": digest_of(said.conversation)}
