"""What the plugin does for an engine: serve it with a log, stand aside, or refuse it.

It stands aside, and vLLM decodes as stock, where a log is only not of use. It refuses what would be wrong.
"""

from collections.abc import Iterator
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.models.config import VerifyAndUpdateConfig
from vllm.platforms import current_platform

from deltalog_kernels.layout import GPU_DIMS
from deltalog_kernels.vllm_plugin import seams
from deltalog_kernels.vllm_plugin.config import SECTION, DeltaLogConfig

# Under vLLM's name, so that its log configuration holds for it.
logger = init_logger(f"vllm.{__name__}")

WORKER_EXTENSION = "deltalog_kernels.vllm_plugin.stats.WorkerStats"
CPU_MODELS = {"Qwen3NextForCausalLM": "models:DeltaLogQwen3NextForCausalLM"}
GPU_MODELS = {
    "KimiLinearForCausalLM": "kimi:DeltaLogKimiLinearForCausalLM",
    "Qwen3_5ForCausalLM": "qwen3_5:DeltaLogQwen35ForCausalLM",
    "Qwen3_5MoeForCausalLM": "qwen3_5:DeltaLogQwen35MoeForCausalLM",
    "Qwen3_5ForConditionalGeneration": "qwen3_5:DeltaLogQwen35ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5:DeltaLogQwen35MoeForConditionalGeneration",
}
"""vLLM's CPU backend runs none of these, or needs what does not load beside it."""
MODELS = CPU_MODELS | ({} if current_platform.is_cpu() else GPU_MODELS)
"""Module and class of this package for each architecture; seams.VERIFIED says which of them serve."""


def active(vllm_config: VllmConfig) -> DeltaLogConfig | None:
    """The settings of an engine that decodes with a log, else None. The same in each of its processes.

    Raises ValueError when the section is wrong.
    """
    config = DeltaLogConfig.from_vllm(vllm_config)
    return None if config is None or aside(vllm_config) else config


def aside(vllm_config: VllmConfig) -> str | None:
    """Why an engine with the section decodes as stock all the same; None when it does not."""
    return next(_reasons_to_stand_aside(vllm_config), None)


def _reasons_to_stand_aside(vllm_config: VllmConfig) -> Iterator[str]:
    yield from seams.problems_here()
    architecture = vllm_config.model_config.architecture
    verified = seams.VERIFIED.get(current_platform.device_type, ())
    if architecture not in verified:
        yield (
            f"expected a model with architecture {', '.join(verified)}, whose decode with a log is verified "
            f"on {current_platform.device_type}, got {architecture}"
        )
        return
    dims = _head_dims(vllm_config)
    if current_platform.is_cuda() and not set(dims) <= set(GPU_DIMS):
        allowed = ", ".join(map(str, GPU_DIMS))
        yield f"expected recurrent heads of {allowed}, got {' by '.join(map(str, dims))}"
    if vllm_config.speculative_config is not None:
        yield "expected no speculative decoding (a log keeps no rejected drafts), got it"
    if vllm_config.cache_config.use_replayssm:
        yield "expected no --use-replayssm (vLLM's own log of updates), got it, and it serves"
    if (kimi_sizes(vllm_config) or {}).get("use_full_rank_gate"):
        yield "expected KDA with a low-rank output gate, got a full-rank one (Kimi-K3's layer)"


def kimi_sizes(vllm_config: VllmConfig) -> dict[str, Any] | None:
    """What a Kimi-Linear says of its KDA layers; None for a model whose recurrent layers are GDN."""
    sizes: dict[str, Any] | None = getattr(
        vllm_config.model_config.hf_text_config, "linear_attn_config", None
    )
    return sizes


def _head_dims(vllm_config: VllmConfig) -> tuple[int, int]:
    kimi = kimi_sizes(vllm_config)
    if kimi is not None:
        return kimi["head_dim"], kimi["head_dim"]
    sizes = vllm_config.model_config.hf_text_config
    return sizes.linear_key_head_dim, sizes.linear_value_head_dim


def checked(stock: type[VerifyAndUpdateConfig]) -> type[VerifyAndUpdateConfig]:
    """``stock`` with our check after it; the same for an engine without the section."""

    def verify_and_update_config(cls: Any, vllm_config: VllmConfig) -> None:
        stock.verify_and_update_config(vllm_config)
        config = DeltaLogConfig.from_vllm(vllm_config)
        if config is None:
            return
        reason = aside(vllm_config)
        if reason:
            logger.warning_once("DeltaLog stands aside, vLLM decodes as stock: %s.", reason)
        else:
            refuse(vllm_config)
            logger.info_once("DeltaLog decodes with a log, merge interval %s.", config.merge_interval)
        if vllm_config.parallel_config.worker_extension_cls == "":
            vllm_config.parallel_config.worker_extension_cls = WORKER_EXTENSION

    return type(stock.__name__, (stock,), {"verify_and_update_config": classmethod(verify_and_update_config)})


def refuse(vllm_config: VllmConfig) -> None:
    """Raise ValueError for an engine that would decode wrongly with a log."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    # vLLM makes a connector of kv_offloading_size later.
    connector = getattr(vllm_config.kv_transfer_config, "kv_connector", None) or (
        vllm_config.cache_config.kv_offloading_size and "kv_offloading_size"
    )
    ranks = {name: getattr(parallel, f"{name}_parallel_size") for name in ("tensor", "pipeline", "data")}
    expectations = [
        (
            model.dtype == torch.bfloat16,
            f"dtype bfloat16 (vLLM's CPU kernels have no other), got {model.dtype}; pass --dtype bfloat16",
        ),
        (
            current_platform.is_cpu() or vllm_config.use_v2_model_runner,
            "vLLM's V2 model runner on a GPU, got V1; unset VLLM_USE_V2_MODEL_RUNNER",
        ),
        (
            connector is None,
            f"no KV connector (it would move states without their logs), got {connector}; "
            "drop --kv-transfer-config and --kv-offloading-size",
        ),
        (
            {**ranks, "tensor": 1 if current_platform.is_cuda() else ranks["tensor"]}
            == dict.fromkeys(ranks, 1),
            f"one rank, or tensor parallelism on GPUs alone, got parallel sizes {ranks}; set the others to 1",
        ),
        (
            parallel.worker_extension_cls in ("", WORKER_EXTENSION),
            f"to be vLLM's only worker extension (it counts there), got {parallel.worker_extension_cls}; "
            "drop --worker-extension-cls",
        ),
    ]
    for met, expectation in expectations:
        if not met:
            raise ValueError(
                f"DeltaLog expects {expectation}, or remove '{SECTION}' from --additional-config"
            )
