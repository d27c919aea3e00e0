"""Where a layer's base state and log lie in vLLM's state pages.

vLLM sizes a page twice: from the model class, to align attention blocks with it, and from each layer,
to allocate it. Both ask here.
"""

from dataclasses import replace
from typing import Any

from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateDtypeCalculator
from vllm.model_executor.models.utils import extract_layer_index

from deltalog_kernels import GDN, KDA, LogLayout
from deltalog_kernels.traffic import best_merge_interval
from deltalog_kernels.vllm_plugin.support import active, kimi_sizes


def recurrent_layout(vllm_config: VllmConfig) -> LogLayout | None:
    """Layout of this rank's recurrent layers, or None for an engine that decodes as stock."""
    config = active(vllm_config)
    if config is None:
        return None
    kimi = kimi_sizes(vllm_config)
    layout = _gdn(vllm_config) if kimi is None else _kda(vllm_config, kimi)
    interval = config.merge_interval
    return replace(layout, merge_interval=best_merge_interval(layout) if interval == "auto" else interval)


def _gdn(vllm_config: VllmConfig) -> LogLayout:
    model, cache = vllm_config.model_config, vllm_config.cache_config
    sizes, ranks = model.hf_text_config, vllm_config.parallel_config.tensor_parallel_size
    _, state_dtype = MambaStateDtypeCalculator.gated_delta_net_state_dtype(
        model.dtype, cache.mamba_cache_dtype, cache.mamba_ssm_cache_dtype
    )
    return LogLayout(
        GDN,
        key_heads=sizes.linear_num_key_heads // ranks,
        value_heads=sizes.linear_num_value_heads // ranks,
        key_dim=sizes.linear_key_head_dim,
        value_dim=sizes.linear_value_head_dim,
        merge_interval=1,
        state_dtype=state_dtype,
        key_dtype=model.dtype,
    )


def _kda(vllm_config: VllmConfig, sizes: dict[str, Any]) -> LogLayout:
    model, cache = vllm_config.model_config, vllm_config.cache_config
    ranks = vllm_config.parallel_config.tensor_parallel_size
    _, state_dtype = MambaStateDtypeCalculator.kda_state_dtype(
        model.dtype, cache.mamba_cache_dtype, cache.mamba_ssm_cache_dtype
    )
    heads, dim = sizes["num_heads"] // ranks, sizes["head_dim"]
    return LogLayout(KDA, heads, heads, dim, dim, 1, state_dtype=state_dtype, key_dtype=model.dtype)


def phase_offset(vllm_config: VllmConfig, layer_name: str) -> int:
    """What a layer adds to positions to find its live length (see layout.live_length).

    Layers take turns to merge, so that rows which arrive together do not make every M-th step slow: the
    offset is the layer's number among the recurrent ones. Prefix caching wants every log empty where a block
    ends: with it the offset is 0.
    """
    if vllm_config.cache_config.enable_prefix_caching:
        return 0
    return recurrent_layers(vllm_config, before=extract_layer_index(layer_name))


def recurrent_layers(vllm_config: VllmConfig, before: int | None = None) -> int:
    """Recurrent layers of the model, or of its first ``before`` layers."""
    kimi = kimi_sizes(vllm_config)
    if kimi is not None:  # counted from 1 there
        return sum(before is None or number <= before for number in kimi["kda_layers"])
    sizes = vllm_config.model_config.hf_text_config
    return list(getattr(sizes, "layer_types", ()))[:before].count("linear_attention")


def log_states(layout: LogLayout) -> tuple[tuple, tuple]:
    """Shapes and dtypes of the states that follow vLLM's own in a page; none for write-through."""
    return (layout.log_shapes, layout.log_dtypes) if layout.capacity else ((), ())
