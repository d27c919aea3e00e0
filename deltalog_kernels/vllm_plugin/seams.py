"""Where the plugin enters vLLM: every name of vLLM's that it builds upon, and a probe of each.

Two registries, no patch: ModelRegistry holds our subclass of each supported model, MODELS_CONFIG_MAP a
check of each engine's configuration. The layer class is registered when vLLM imports the model.
"""

import dataclasses
import inspect
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from vllm import __version__ as vllm_version
from vllm import envs
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig
from vllm.platforms import current_platform

SUPPORTED_VLLM = "0.32"
VERIFIED = {
    "cpu": ("Qwen3NextForCausalLM",),
    "cuda": ("Qwen3NextForCausalLM", "Qwen3_5MoeForCausalLM", "KimiLinearForCausalLM"),
}
"""Architectures whose decode with a log has passed the engine tests, by platform. Dense Qwen3.5 and
those with vision have classes too, of whose tests none has been run."""
_PACKAGE = "deltalog_kernels.vllm_plugin"
_GDN = "vllm.model_executor.layers.mamba.gdn"
_BUILDER = "vllm.v1.attention.backends.gdn_attn:GDNAttentionMetadataBuilder"


@dataclass(frozen=True)
class Seam:
    """A callable of vLLM's that must take ``names``, or a class or module that must have them.

    target: ``module:qualified.name``. why: what we build upon it. platform: where alone it matters.
    """

    target: str
    names: tuple[str, ...]
    why: str
    platform: str | None = None

    def fault(self) -> str | None:
        """What is not as expected; None when nothing is."""
        module, _, path = self.target.partition(":")
        try:
            found: Any = import_module(module)
            for part in filter(None, path.split(".")):
                found = (
                    inspect.getattr_static(found, part) if isinstance(found, type) else getattr(found, part)
                )
        except (ImportError, AttributeError) as error:
            return f"expected {self.target} ({self.why}), got {error!r}"
        missing = [name for name in self.names if name not in _names(found)]
        return (
            f"expected {self.target} to have {', '.join(missing)} ({self.why}), got none" if missing else None
        )


def _names(found: Any) -> set[str]:
    """Parameters of a function or method; fields and attributes of a class or module."""
    function = getattr(found, "__func__", found)
    if inspect.isfunction(function):
        return set(inspect.signature(function).parameters)
    fields = {field.name for field in dataclasses.fields(found)} if dataclasses.is_dataclass(found) else set()
    return fields | set(dir(found))


SEAMS = (
    Seam(
        f"{_GDN}.qwen_gdn_linear_attn:QwenGatedDeltaNetAttention._forward_core",
        ("mixed_qkv", "b", "a", "core_attn_out"),
        "convolution and recurrence of a GDN layer",
        "cuda",
    ),
    Seam(
        f"{_GDN}.qwen_gdn_linear_attn:QwenGatedDeltaNetAttention",
        ("forward_cpu", "get_state_shape", "get_state_dtype", "get_attn_backend", "bind_kv_cache",
         "fix_query_key_value_ordering", "_output_projection", "_warmup_prefill_kernels"),
        "the GDN layer",
    ),
    Seam(
        f"{_GDN}.kimi_gdn_linear_attn:KimiGatedDeltaNetAttention._forward",
        ("mixed_qkv", "g1", "g2", "beta", "core_attn_out"),
        "convolution, recurrence and norm of a KDA layer",
        "cuda",
    ),
    Seam(_BUILDER, ("_stage_decode", "update_block_table", "build_for_cudagraph_capture"), "a step's rows"),
    Seam(f"{_BUILDER}.build", ("common_prefix_len", "common_attn_metadata"), "a step's rows"),
    Seam(
        "vllm.v1.attention.backends.gdn_attn:GDNAttentionMetadata",
        ("num_decodes", "num_prefills", "num_decode_tokens", "num_prefill_tokens", "num_actual_tokens",
         "has_initial_state", "non_spec_state_indices_tensor", "non_spec_query_start_loc",
         "prefill_query_start_loc", "prefill_state_indices", "nums_dict", "batch_ptr",
         "token_chunk_offset_ptr"),
        "decode rows and prefill rows of a batch",
    ),
    Seam(
        "vllm.v1.attention.backend:CommonAttentionMetadata",
        ("seq_lens", "query_start_loc", "query_start_loc_cpu", "seq_lens_cpu_upper_bound"),
        "positions of the rows",
    ),
    Seam(
        "vllm.model_executor.layers.mamba.ops.causal_conv1d:causal_conv1d_update",
        ("x", "conv_state", "weight", "bias", "activation", "conv_state_indices", "validate_data", "out"),
        "convolution of decode rows",
        "cuda",
    ),
    Seam(
        "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention",
        ("_cpu_gdn_attention_nonspec", "_causal_conv1d_update_cpu", "causal_conv1d_update_cpu",
         "is_arm_bf16"),
        "vLLM's kernels on a CPU",
        "cpu",
    ),
    Seam(
        "vllm.model_executor.layers.mamba.mamba_utils:MambaStateDtypeCalculator",
        ("gated_delta_net_state_dtype", "kda_state_dtype"),
        "dtype of the base state",
    ),
    Seam("vllm.model_executor.custom_op:PluggableLayer", ("register_oot",), "our layer for vLLM's"),
    Seam("vllm.v1.worker.worker_base:WorkerWrapperBase", ("init_worker",), "the counters' worker extension"),
)  # fmt: skip


@cache
def broken() -> tuple[str, ...]:
    """What this vLLM does not have as the plugin needs it, on this platform."""
    here = current_platform.device_type
    faults = [seam.fault() for seam in SEAMS if seam.platform in (None, here)]
    return tuple(f"{fault} in vLLM {vllm_version}" for fault in faults if fault)


@cache
def install() -> None:
    """Enter vLLM's registries, once a process."""
    import deltalog_kernels.vllm_plugin.seeded_weights  # noqa: F401  (registers its load format)
    from deltalog_kernels.vllm_plugin.support import MODELS, checked

    for architecture in ModelRegistry.get_supported_archs():
        stock = MODELS_CONFIG_MAP.get(architecture, VerifyAndUpdateConfig)
        MODELS_CONFIG_MAP[architecture] = checked(stock)
    if vllm_version.startswith(SUPPORTED_VLLM + "."):
        for architecture, qualname in MODELS.items():
            ModelRegistry.register_model(architecture, f"{_PACKAGE}.{qualname}")


def describe() -> str:
    """The vLLM that is installed, in words."""
    return f"vLLM {vllm_version} on {current_platform.device_type}"


@cache
def problems_here() -> tuple[str, ...]:
    """What keeps the plugin from working with the vLLM that runs, each with its remedy."""
    expectations = [
        (
            vllm_version.startswith(SUPPORTED_VLLM + "."),
            f"vLLM {SUPPORTED_VLLM}.x, got {vllm_version}; install vllm=={SUPPORTED_VLLM}.0",
        ),
        (
            current_platform.device_type in VERIFIED,
            f"vLLM on {' or '.join(VERIFIED)}, where decode with a log is verified, got "
            f"{current_platform.device_type}; use stock vLLM there",
        ),
    ]
    return (*(f"expected {expectation}" for met, expectation in expectations if not met), *broken())


def problems() -> list[str]:
    """What keeps vLLM from loading the plugin, or the plugin from working, each with its remedy."""
    loads = entry_points(group="vllm.general_plugins", name="deltalog")
    allowed = envs.VLLM_PLUGINS is None or "deltalog" in envs.VLLM_PLUGINS
    expectations = [
        (bool(loads), "the entry point vllm.general_plugins: deltalog, got none; install the package again"),
        (allowed, f"VLLM_PLUGINS to be unset or to name deltalog, got {envs.VLLM_PLUGINS}; change it"),
    ]
    return [*problems_here(), *(f"expected {expectation}" for met, expectation in expectations if not met)]
