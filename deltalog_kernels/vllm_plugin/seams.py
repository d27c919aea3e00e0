"""Where the plugin enters vLLM, and what it refuses there.

Two registries, no patch: ModelRegistry holds our subclass of each supported model, MODELS_CONFIG_MAP a
check of each engine's configuration. The layer class is registered when vLLM imports the model.
"""

from functools import cache
from importlib.metadata import entry_points
from typing import Any

import torch
from vllm import __version__ as vllm_version
from vllm import envs
from vllm.config import VllmConfig
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig
from vllm.platforms import current_platform

from deltalog_kernels.vllm_plugin.config import SECTION, DeltaLogConfig

SUPPORTED_VLLM = "0.32"
_PACKAGE = "deltalog_kernels.vllm_plugin"
MODELS = {"Qwen3NextForCausalLM": f"{_PACKAGE}.models:DeltaLogQwen3NextForCausalLM"}
"""Our model for each architecture, on any platform."""
GPU_MODELS = {
    "KimiLinearForCausalLM": f"{_PACKAGE}.kimi:DeltaLogKimiLinearForCausalLM",
    **{
        f"Qwen3_5{kind}": f"{_PACKAGE}.qwen3_5:DeltaLogQwen35{kind}"
        for kind in (
            "ForCausalLM",
            "MoeForCausalLM",
            "ForConditionalGeneration",
            "MoeForConditionalGeneration",
        )
    },
}
"""More of them where the kernels run on a GPU."""
WORKER_EXTENSION = "deltalog_kernels.vllm_plugin.stats.WorkerStats"


@cache
def install() -> None:
    """Enter vLLM's registries, once a process."""
    import deltalog_kernels.vllm_plugin.seeded_weights  # noqa: F401  (registers its load format)

    for architecture in ModelRegistry.get_supported_archs():
        stock = MODELS_CONFIG_MAP.get(architecture, VerifyAndUpdateConfig)
        MODELS_CONFIG_MAP[architecture] = _checked(stock)
    if vllm_version.startswith(SUPPORTED_VLLM + "."):
        for architecture, qualname in models().items():
            ModelRegistry.register_model(architecture, qualname)


def models() -> dict[str, str]:
    """Our model for each architecture that this platform can serve with a log."""
    return MODELS if current_platform.is_cpu() else MODELS | GPU_MODELS


def describe() -> str:
    """The vLLM that is installed, in words."""
    return f"vLLM {vllm_version} on {current_platform.device_type}"


def problems() -> list[str]:
    """What keeps this vLLM from loading the plugin, each with its remedy."""
    loads = entry_points(group="vllm.general_plugins", name="deltalog")
    allowed = envs.VLLM_PLUGINS is None or "deltalog" in envs.VLLM_PLUGINS
    expectations = [
        *_expectations_of_vllm(),
        (bool(loads), "the entry point vllm.general_plugins: deltalog, got none; install the package again"),
        (allowed, f"VLLM_PLUGINS to be unset or to name deltalog, got {envs.VLLM_PLUGINS}; change it"),
    ]
    return [f"expected {expectation}" for met, expectation in expectations if not met]


def _expectations_of_vllm() -> list[tuple[bool, str]]:
    """(whether met, what is expected, what came, what to do) of the installed vLLM."""
    return [
        (
            vllm_version.startswith(SUPPORTED_VLLM + "."),
            f"vLLM {SUPPORTED_VLLM}.x, got {vllm_version}; install vllm=={SUPPORTED_VLLM}.0",
        ),
        (
            current_platform.is_cpu() or current_platform.is_cuda(),
            f"an NVIDIA GPU or vLLM's CPU backend, got {current_platform.device_type}; use one of them",
        ),
    ]


def _checked(stock: type[VerifyAndUpdateConfig]) -> type[VerifyAndUpdateConfig]:
    """``stock`` with our check after it; the same for an engine without the section."""

    def verify_and_update_config(cls: Any, vllm_config: VllmConfig) -> None:
        stock.verify_and_update_config(vllm_config)
        if DeltaLogConfig.from_vllm(vllm_config) is not None:
            check(vllm_config)
            vllm_config.parallel_config.worker_extension_cls = WORKER_EXTENSION

    return type(stock.__name__, (stock,), {"verify_and_update_config": classmethod(verify_and_update_config)})


def check(vllm_config: VllmConfig) -> None:
    """Raise ValueError for an engine that would decode wrongly, or without a log, with the section set."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    # vLLM makes a connector of kv_offloading_size later.
    connector = getattr(vllm_config.kv_transfer_config, "kv_connector", None) or (
        vllm_config.cache_config.kv_offloading_size and "kv_offloading_size"
    )
    ranks = {name: getattr(parallel, f"{name}_parallel_size") for name in ("tensor", "pipeline", "data")}
    expectations = [
        *_expectations_of_vllm(),
        (
            model.architecture in models(),
            f"a model with architecture {', '.join(models())}, got {model.architecture}; serve such a model",
        ),
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
            vllm_config.speculative_config is None,
            "no speculative decoding (a log keeps no rejected drafts); drop --speculative-config",
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
