"""The fields service of one HTTP process: declares, lists and removes fields.

It holds no fields (the book lives in the scheduler, where prompts are looked through), but the
chat form: only this process has the server's chat path.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from kvedit.checks import check_name
from kvedit.errors import BadRequest, Unsupported
from kvedit.fields.declaration_parser import parse_declaration
from kvedit.namespace import SHARED, namespace_tag
from kvedit.text.chat_probe import ChatForm, derive_chat_form
from kvedit.text.tokens import TokenText
from kvedit.wire.commands import DeclareField, ListFields, RemoveField, ShowField
from kvedit.wire.views import DeclaredView, FieldsView, FieldView
from sglang_patches.host.protocols import TokenizerManager
from sglang_patches.http.services import rpc
from sglang_patches.http.services.auth import Caller
from sglang_patches.http.services.mirror import Mirror

Messages = list[dict[str, str]]


class FieldService:
    def __init__(self, tokenizer_manager: TokenizerManager) -> None:
        self._manager = tokenizer_manager
        self._mirror = Mirror(tokenizer_manager)
        self._form: ChatForm | None = None  # derived for the first field that has a role

    async def declare(self, body: Any, caller: Caller, chat: Callable[[], Any]) -> DeclaredView:
        """Declare a field, always as an admin. Returns its view and whether it is new.

        ``chat`` gives the host's OpenAIServingChat. Raises Forbidden, BadRequest (also with all
        reasons why this server's chat form is not understood), Conflict, QuotaExceeded.
        """
        caller.require_admin("fields")
        declaration = parse_declaration(body)
        if self._manager.tokenizer is None:
            raise BadRequest("kvedit: fields: expected a tokenizer, got --skip-tokenizer-init")
        namespace = (
            SHARED
            if declaration.shared
            else namespace_tag(declaration.cache_salt, declaration.extra_key, None)
        )
        role = declaration.where.role
        command = DeclareField(
            # a salt is a secret of its user: the namespace stands for it
            declaration=dataclasses.replace(declaration, cache_salt=None, extra_key=None),
            namespace=namespace,
            form=None if role is None else self._chat_form(role, chat),
        )
        view = await rpc.call(self._manager, command)
        self._mirror.forget()
        return view

    async def listed(self, caller: Caller) -> FieldsView:
        """Views of the fields of the caller's namespace and of the shared ones."""
        return await self._mirror.read(ListFields(namespace=caller.namespace))

    async def show(self, name: str, caller: Caller) -> FieldView:
        """The view of a field of the caller's namespace, else of the shared one. Or NotFound."""
        check_name(name)
        return await self._mirror.read(ShowField(name=name, namespace=caller.namespace))

    async def remove(self, name: str, caller: Caller, *, shared: bool = False) -> FieldView:
        """Forget a field of exactly this namespace. Returns its last view. Or NotFound."""
        caller.require_admin("fields")
        check_name(name)
        namespace = SHARED if shared else caller.namespace
        view = await rpc.call(self._manager, RemoveField(name=name, namespace=namespace))
        self._mirror.forget()
        return view

    def _chat_form(self, role: str, chat: Callable[[], Any]) -> ChatForm:
        """The server's chat form, which must know ``role``. Raises BadRequest with all reasons."""
        if self._form is None:
            try:
                tokens = TokenText(self._manager.tokenizer)
                self._form = derive_chat_form(renderer(chat()), tokens)
            except Unsupported as error:
                raise _unknown_role(role, error.reasons) from error
        if role not in self._form.roles:
            raise _unknown_role(role, [f"{r}: {why}" for r, why in self._form.lacking])
        return self._form


def _unknown_role(role: str, reasons: Sequence[str]) -> BadRequest:
    return BadRequest(
        f"kvedit: where.role: expected a chat template in which {role!r} messages are told by "
        f'control tokens (raw text: {{"within": N}}), got: {"; ".join(reasons)}'
    )


def renderer(serving_chat: Any) -> Callable[[Messages, bool], list[int]]:
    """Token ids of a conversation, by the way that /v1/chat/completions takes.

    It honours the server's template, python encoders and default template arguments. What a
    template refuses is raised as it comes.
    """
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

    def render(messages: Messages, add_generation_prompt: bool) -> list[int]:
        spelled = [
            {**message, "tool_call_id": f"call_{i}"} if message["role"] == "tool" else message
            for i, message in enumerate(messages)
        ]
        request = ChatCompletionRequest(model="kvedit", messages=spelled)
        if not add_generation_prompt:
            request._format_add_generation_prompt = False
        return list(serving_chat._process_messages(request, False).prompt_ids)

    return render
