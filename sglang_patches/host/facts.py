"""What this server is, asked as the host asks: what it resolved, not what the operator gave."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.arg_groups.overrides import resolution_result

from sglang_patches.pools import GroupWithRope

if TYPE_CHECKING:
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext


def has_overlap(server_args: Any) -> bool:
    """Whether forwards run on a stream of their own while the scheduler goes on."""
    return not resolution_result(server_args, "disable_overlap_schedule")


def model_name(server_args: Any) -> str:
    given = resolution_result(server_args, "served_model_name")
    return str(given or resolution_result(server_args, "model_path"))


def host_facts(ctx: TreeCacheBuildContext, groups: list[GroupWithRope]) -> dict[str, str | None]:
    """All that shapes KV bytes on this server besides the tokens (see kvedit.identity)."""
    config: Any = ctx.model_config
    return {
        "model_path": config.model_path,
        "revision": config.revision,
        "model_dtype": str(config.dtype),
        "quantization": config.quantization,
        "kv_dtypes": ",".join(str(group.group.dtype) for group in groups),
        "ropes": ",".join(str(group.signature) for group in groups),
        "page_size": str(ctx.params.page_size),
        "tp_size": str(ctx.tp_size),
    }
