"""The HTTP process: routes, intake of generate requests, reports and recompiles.

Nothing here imports the host before a hook runs: the plugin loads first.

Called by: the plugin.
May touch: requests and answers; the scheduler in commands only.
"""

from __future__ import annotations

from typing import Any

from sglang_patches.host.protocols import TokenizerManager

_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_ROUTES = "sglang.srt.entrypoints"
_LOGGER = "sglang.srt.utils.request_logger.RequestLogger"


def register_http_hooks(registry: Any, hook_type: Any) -> None:
    """Register every hook of this process. ``registry`` and ``hook_type`` are the host's own."""
    from sglang_patches.http import decoding, gate
    from sglang_patches.http.answers import openai, other_ids, reports
    from sglang_patches.http.request import request_log
    from sglang_patches.http.services import auth

    around = {
        f"{_MANAGER}.generate_request": gate.generate_request,
        f"{_MANAGER}.update_request_meta_info": reports.keep_report,
        f"{_MANAGER}._handle_abort_finish_reason": reports.raise_refusal,
        f"{_ROUTES}.openai.serving_base.OpenAIServingBase.handle_request": openai.add_report,
        f"{_ROUTES}.anthropic.serving.AnthropicServing.handle_messages": other_ids.keep_message,
        f"{_ROUTES}.ollama.serving.OllamaServing.handle_chat": other_ids.name_answer,
        f"{_ROUTES}.ollama.serving.OllamaServing.handle_generate": other_ids.name_answer,
        f"{_LOGGER}.log_openai_received_request": request_log.log_received,
        "sglang.srt.utils.auth.decide_request_auth": auth.decide,
    }
    for target, hook in around.items():
        registry.register(target, hook, hook_type.AROUND)
    registry.register(f"{_MANAGER}._create_tokenized_object", decoding.check_wire, hook_type.AFTER)
    registry.register(
        "sglang.srt.entrypoints.http_server._setup_and_run_http_server",
        _add_routes,
        hook_type.BEFORE,
    )


def _add_routes(
    server_args: Any, tokenizer_manager: TokenizerManager, *args: Any, **kwargs: Any
) -> None:
    """BEFORE ``_setup_and_run_http_server``: an error here stops the start-up."""
    from sglang.srt.entrypoints import http_server

    from sglang_patches.http.admin.routes import add_routes
    from sglang_patches.http.services.auth import Door
    from sglang_patches.http.services.skill_service import is_enabled, service_of

    if not is_enabled(tokenizer_manager):
        return
    service = service_of(tokenizer_manager)
    door = Door(server_args.api_key, server_args.admin_api_key, service.config.open)
    add_routes(http_server.app, service, door)
