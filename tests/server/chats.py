"""Chats whose system message holds two fields. The client re-sends everything, new values in place.

``order_status`` stands near the top, ``stock_level`` in the middle of a policy, so a change of
either has text behind it that an ordinary prefix cache loses.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.server.canary import encode
from tests.server.harness import Server, fresh_name
from tests.server.texts import english

PATTERNS = {"order": "order_status: {value}", "stock": "stock_level: {value}"}
VALUES = {"order": "open", "stock": "eleven boxes"}
TEMPLATE = (
    "[kvedit update] {name} is now {value}. "
    "This overrides the earlier value and every conclusion drawn from it."
)
LINE = re.compile(
    r"\n"
    + re.escape(TEMPLATE)
    .replace(re.escape("{name}"), r"(\w+)")
    .replace(re.escape("{value}"), "(.*?)")
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n"

Message = dict[str, Any]


def line(name: str, value: str) -> str:
    return "\n" + TEMPLATE.replace("{name}", name).replace("{value}", value)


def declare(server: Server, salt: str, strategy: str, **keys: Any) -> None:
    """Both fields, in the namespace of ``salt``."""
    for name, pattern in PATTERNS.items():
        body = {"name": name, "pattern": pattern, "strategy": strategy, "namespace": salt}
        body["template"] = TEMPLATE
        server.call("POST", "/kvedit/fields", {**body, **keys})


def remove_fields(server: Server, salt: str) -> None:
    for view in server.call("GET", f"/kvedit/fields?cache_salt={salt}")["fields"]:
        server.call("DELETE", f"/kvedit/fields/{view['name']}?cache_salt={salt}")


def system(values: Mapping[str, str], policy: str) -> str:
    middle = policy.find(". ", len(policy) // 2) + 2
    return (
        f"You answer at the desk of a shop.\norder_status: {values['order']}\n{policy[:middle]}"
        f"\nstock_level: {values['stock']}\n{policy[middle:]}"
    )


def render(messages: Sequence[Message], generation: bool = True) -> str:
    """What the model's chat template makes of messages."""
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    return text + "<|im_start|>assistant\n" if generation else text


@dataclass(frozen=True)
class Reply:
    text: str
    report: dict[str, Any]
    prompt_tokens: int
    rid: str
    sent: list[Message]  # the request's messages
    values: dict[str, str]

    @property
    def reused(self) -> int:
        return sum(self.report[kind] for kind in ("exact", "composed", "derived"))

    @property
    def errata(self) -> list[str]:
        return [erratum["field"] for erratum in self.report["errata"]]

    @property
    def line_tokens(self) -> int:
        return sum(erratum["stop"] - erratum["start"] for erratum in self.report["errata"])


@dataclass
class Chat:
    """One conversation. ``history`` is what was said behind the system message."""

    server: Server
    salt: str
    policy: str
    values: dict[str, str] = field(default_factory=lambda: dict(VALUES))
    history: list[Message] = field(default_factory=list)
    num_new: int = 4

    def ask(self, content: str, role: str = "user", **options: Any) -> Reply:
        """Say something and keep the reply."""
        self.history.append({"role": role, "content": content})
        return self.again(**options)

    def again(self, **options: Any) -> Reply:
        """Send what was said so far with the values of now: a regenerate when a reply is last."""
        if self.history[-1]["role"] == "assistant":
            self.history.pop()
        reply = self.send(self.history, **options)
        self.history.append({"role": "assistant", "content": reply.text})
        return reply

    def send(self, history: Sequence[Message], **options: Any) -> Reply:
        """A request that leaves the conversation as it is."""
        messages = [{"role": "system", "content": system(self.values, self.policy)}, *history]
        body = {"model": "m", "messages": messages, "temperature": 0, "cache_salt": self.salt}
        body |= {"max_tokens": self.num_new}
        if options:
            body["custom_params"] = {"kvedit": options}
        answer = self.server.call("POST", "/v1/chat/completions", body)
        return Reply(
            text=answer["choices"][0]["message"]["content"],
            report=answer["metadata"]["kvedit"],
            prompt_tokens=answer["usage"]["prompt_tokens"],
            rid=answer["id"],
            sent=messages,
            values=dict(self.values),
        )

    def served(self, reply: Reply) -> str:
        """The prompt's text as the model saw it; what must hold of it for any strategy is
        checked."""
        text: str = self.server.testing(op="served", rid=reply.rid)["text"]
        check_served(text, reply)
        return text

    def branch(self) -> Chat:
        twin = Chat(self.server, self.salt, self.policy, dict(self.values), num_new=self.num_new)
        twin.history = list(self.history)
        return twin


def new_chat(server: Server, strategy: str, num_sentences: int = 16, **keys: Any) -> Chat:
    """A conversation in a namespace of its own. ``keys``: for the fields' declarations."""
    salt = fresh_name()
    declare(server, salt, strategy, **keys)
    return Chat(server, salt, english(salt, num_sentences))


def in_force(text: str, name: str) -> str:
    """What a served prompt says last of a field."""
    lines = [value for field_name, value in LINE.findall(text) if field_name == name]
    return lines[-1] if lines else in_window(text, name)


def in_window(text: str, name: str) -> str:
    prefix = PATTERNS[name].partition("{value}")[0]
    return text[text.index(prefix) + len(prefix) :].partition("\n")[0]


def check_served(text: str, reply: Reply) -> None:
    """Without its lines and with the values of now the served prompt is the one that was sent;
    it says the newest value, and each message says it at most once."""
    windows = {name: in_window(text, name) for name in PATTERNS}
    plain = LINE.sub("", text)
    for name, value in windows.items():
        prefix = PATTERNS[name].partition("{value}")[0]
        plain = plain.replace(f"{prefix}{value}\n", f"{prefix}{reply.values[name]}\n", 1)
    assert plain == render(reply.sent)
    assert {name: in_force(text, name) for name in PATTERNS} == reply.values
    for message in text.split("<|im_start|>"):
        said = [name for name, _ in LINE.findall(message)]
        assert len(said) == len(set(said)), f"several live errata of one field: {said}"
    last = text.removesuffix(SUFFIX).rpartition("<|im_start|>")[2]
    assert sorted(name for name, _ in LINE.findall(last)) == sorted(reply.errata)


def num_unchanged(chat: Chat, before: Reply, now: Reply) -> int:
    """Client tokens of the conversation so far that stand in the new request as they did."""
    old = [*before.sent, {"role": "assistant", "content": before.text}]
    changed = {name for name in PATTERNS if before.values[name] != now.values[name]}
    values = {name: "" if name in changed else value for name, value in now.values.items()}
    head = {"role": "system", "content": system(values, chat.policy)}
    return len(encode(render([head, *old[1:]], generation=False)))
