"""Plugin entry point `kvedit_cpu`, and the list of everything a CPU host gets.

`register` is called by SGLang's plugin loader in every process; it acts only where
`sglang_patches.cpu.prepare` found no GPU. Both arms of a comparison load it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from sglang_patches.cpu import ADAPT_ENV
from sglang_patches.cpu.standin import has_cuda_device

BACKEND = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
EXTEND_TARGET = BACKEND + "._run_sdpa_forward_extend"
DECODE_TARGET = BACKEND + "._run_sdpa_forward_decode"
FORWARD_EXTEND_TARGET = BACKEND + ".forward_extend"
LINEAR_TARGET = "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply"


def register() -> None:
    """Entry point in group `sglang.srt.plugins`: hook the attention replacement on CPU hosts."""
    if os.environ.get(ADAPT_ENV) != "1" or has_cuda_device():
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_patches.cpu import attention, linear

    HookRegistry.register(EXTEND_TARGET, attention.extend, HookType.AROUND)
    HookRegistry.register(DECODE_TARGET, attention.decode, HookType.AROUND)
    HookRegistry.register(FORWARD_EXTEND_TARGET, attention.forward_extend, HookType.AROUND)
    if linear.is_needed():
        HookRegistry.register(LINEAR_TARGET, linear.apply, HookType.AROUND)


@dataclass(frozen=True)
class Adaptation:
    """One change a CPU host gets: what it is, why, and when it can be deleted."""

    name: str
    reason: str
    delete_when: str


ADAPTATIONS = (
    Adaptation(
        "sgl_kernel stand-in",
        "sgl_kernel loads CUDA libraries at import, and SGLang's CPU path imports it for "
        "pure-Python names",
        "`import sgl_kernel` succeeds on a host without libcuda.so.1",
    ),
    Adaptation(
        "extend attention of torch_native",
        "the stock loop pads the queries with the whole cached prefix, so that extending a "
        "prompt by one token costs the attention of all of it; both arms of a comparison get "
        "the replacement",
        "TorchNativeAttnBackend._run_sdpa_forward_extend no longer allocates "
        "per_req_query_redudant",
    ),
    Adaptation(
        "decode attention of torch_native",
        "one query row per head is 6x slower in torch's CPU kernel than the heads of a group "
        "as the rows of one query; both arms get the replacement",
        "torch's CPU flash attention is as fast with enable_gqa and one query row",
    ),
    Adaptation(
        "MLA prompts on torch_native",
        "torch_native reads K and V from the pool, which holds latents for an MLA model; a prompt "
        "without a cached prefix comes with its full K and V as arguments",
        "a DeepSeek-V2 model answers its first prompt with --attention-backend torch_native",
    ),
    Adaptation(
        "windowed layers of a hybrid pool on torch_native",
        "torch_native writes their K and V to slots of the window pool and reads them at the "
        "slots of the full one; both arms get the replacement, which translates for both",
        "TorchNativeAttnBackend translates slots in _run_sdpa_forward_extend and _decode",
    ),
    Adaptation(
        "linear layers in bf16 on a processor without bf16 instructions",
        "torch multiplies bf16 matrices about 7x slower than fp32 ones there; the product is taken "
        "in fp32 and rounded once, as bf16 instructions do; both arms get the replacement",
        "torch.nn.functional.linear is as fast in bf16 as in fp32 on such a processor",
    ),
    Adaptation(
        "SGLANG_USE_CPU_ENGINE=1 and --device cpu",
        "SGLang does not choose its CPU platform by itself",
        "SGLang starts on a host without an accelerator with no flag",
    ),
    Adaptation(
        "--attention-backend torch_native",
        "the default CPU backend (intel_amx) calls compiled kernels of sgl_kernel",
        "intel_amx runs with the installed wheels",
    ),
    Adaptation(
        "--sleep-on-idle",
        "an idle scheduler spins and takes a whole core",
        "SGLang's schedulers block when idle by default",
    ),
    Adaptation(
        "OMP_NUM_THREADS=1",
        "thread barriers stall 10x to 50x when threads outnumber free cores; set the variable "
        "to use more",
        "never by itself: the user decides; it is only a default",
    ),
    Adaptation(
        "--chunked-prefill-size 2048",
        "bounds the pause of running requests while a long prompt is prefilled, and the memory "
        "of one forward",
        "SGLang derives a chunk size for CPU hosts",
    ),
    Adaptation(
        "--max-total-tokens",
        "the share of memory SGLang takes by default would leave nothing to other programs; "
        "the default is a quarter of the free memory, at most 65,536 tokens",
        "SGLang sizes the pool of a CPU host from the memory that is free",
    ),
    Adaptation(
        "HF_HUB_OFFLINE=1",
        "the model is a local folder; a look-up on the network only delays the start",
        "never by itself: set HF_HUB_OFFLINE=0 to load a model by its hub name",
    ),
)
