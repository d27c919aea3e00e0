"""Whether a model and one request fit into the GPUs of a replica, before anything is loaded."""

from math import prod
from pathlib import Path

from vllm.config import VllmConfig
from vllm.model_executor.models.registry import ModelRegistry
from vllm.utils.torch_utils import get_dtype_size

from deltalog_kernels.vllm_plugin.support import kimi_sizes
from service.accelerators import ACCELERATORS
from service.config import ConfigError
from service.pools import PoolConfig


def check_memory(pool: PoolConfig, config: VllmConfig) -> None:
    """Raises ConfigError where they do not. Weights are the files of a local model; others are not known.

    What vLLM itself needs beside them (activations, CUDA graphs, its context) comes on top, and differs: what
    passes here may still not start.
    """
    if pool.accelerator is None:
        return
    ranks = config.parallel_config.world_size
    usable = int(ACCELERATORS[pool.accelerator].memory_bytes * config.cache_config.gpu_memory_utilization)
    weights = sum(file.stat().st_size for file in Path(pool.model).glob("*.safetensors")) // ranks
    request = request_bytes(config)
    if weights + request > usable:
        raise ConfigError(
            f"pool {pool.name!r}: accelerator: expected weights and one request to fit {_gib(usable)} of a "
            f"{pool.accelerator}; got {_gib(weights)} of weights and {_gib(request)} for a request of "
            f"{config.model_config.max_model_len} tokens on each of {ranks} GPUs; take more GPUs, a smaller "
            "model or less context"
        )


def request_bytes(config: VllmConfig) -> int:
    """Bytes on one rank of a request as long as the model's context: keys and values of its attention layers,
    and the state of its recurrent ones, without a log."""
    model, parallel = config.model_config, config.parallel_config
    layers, kimi = model.get_num_layers(parallel), kimi_sizes(config)
    # vLLM cannot tell a Kimi-Linear's kinds of layers apart.
    recurrent = (
        model.get_num_layers_by_block_type(parallel, "linear_attention")
        if kimi is None
        else len(kimi["kda_layers"]) // parallel.pipeline_parallel_size
    )
    attention = layers - recurrent
    whole = config.cache_config.cache_dtype in ("auto", "bfloat16", "float16")
    item = get_dtype_size(model.dtype) if whole else 1
    # Latent attention keeps one vector a token in the place of keys and values.
    vectors = 1 if model.use_mla else 2
    per_token = vectors * model.get_num_kv_heads(parallel) * model.get_head_size() * item
    state = 0
    if recurrent:
        kind, _ = ModelRegistry.resolve_model_cls(model.architectures, model_config=model)
        shapes = kind.get_mamba_state_shape_from_config(config)
        dtypes = kind.get_mamba_state_dtype_from_config(config)
        state = sum(prod(shape) * get_dtype_size(each) for shape, each in zip(shapes, dtypes, strict=True))
    return int(attention * per_token * model.max_model_len + recurrent * state)


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
