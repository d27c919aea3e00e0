"""The recurrent layer with a log: decode rows are ours, prefill rows go to vLLM's own kernel."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.custom_op import PluggableLayer
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention as stock
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.attention.backend import AttentionBackend

from deltalog_kernels import LogLayout, SlotMemory, fold_and_fill, gdn_gates, gdn_step
from deltalog_kernels.vllm_plugin.metadata import DeltaLogGDNBackend, DeltaLogGDNMetadata
from deltalog_kernels.vllm_plugin.pages import gdn_layout, log_states, phase_offset


@PluggableLayer.register_oot(name="QwenGatedDeltaNetAttention")
class DeltaLogQwenGDN(QwenGatedDeltaNetAttention):
    """QwenGatedDeltaNetAttention whose page holds a log behind vLLM's two states."""

    layout: LogLayout
    phase_offset: int
    memory: SlotMemory

    def __init__(self, config: Any, vllm_config: VllmConfig, prefix: str = "", **kwargs: Any) -> None:
        layout = gdn_layout(vllm_config)
        if layout is None:
            # vLLM replaces the class for every engine of the process; this one did not ask for it.
            self.__class__ = QwenGatedDeltaNetAttention
        QwenGatedDeltaNetAttention.__init__(self, config, vllm_config, prefix, **kwargs)
        if layout is not None:
            self.layout = layout
            self.phase_offset = phase_offset(vllm_config, prefix)

    def get_state_shape(self) -> Iterable[tuple[int, ...]]:
        return (*super().get_state_shape(), *log_states(self.layout)[0])

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return (*super().get_state_dtype(), *log_states(self.layout)[1])

    def get_attn_backend(self) -> type[AttentionBackend]:
        return DeltaLogGDNBackend

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        super().bind_kv_cache(kv_cache)
        if self.layout.capacity:
            _, base, *log = self.kv_cache
            # vLLM's CPU kernels keep each head's state K-major in storage that it declares [V, K].
            key_major = base.view(-1, self.layout.value_heads, self.layout.key_dim, self.layout.value_dim)
            self.memory = SlotMemory(self.layout, key_major.transpose(-1, -2), *log)

    def forward_cpu(self, hidden_states: Tensor) -> Tensor:
        """vLLM's projections around our core; hidden_states [tokens, hidden]."""
        qkvz, _ = self.in_proj_qkvz(hidden_states)
        ba, _ = self.in_proj_ba(hidden_states)
        q, k, v, z, b, a = self.fix_query_key_value_ordering(qkvz, ba)
        mixed_qkv = torch.cat([part.flatten(1) for part in (q, k, v)], dim=-1)
        core_out = torch.zeros_like(z)
        torch.ops.vllm.deltalog_cpu_gdn_core(mixed_qkv, b, a, core_out, self.prefix)
        return self._output_projection(core_out, z)

    def forward_core(
        self, metadata: DeltaLogGDNMetadata, mixed_qkv: Tensor, b: Tensor, a: Tensor, out: Tensor
    ) -> None:
        """Convolution and recurrence of one step; out [tokens, HV, V] is written for actual tokens."""
        if not self.layout.capacity:
            stock._cpu_gdn_attention_nonspec(self, metadata, mixed_qkv, b, a, out)
            return
        decodes = metadata.num_decodes
        assert metadata.starts is not None
        assert metadata.ends is not None
        if decodes:
            self._decode(metadata, mixed_qkv[:decodes], b[:decodes], a[:decodes], out[:decodes])
        if metadata.prefill_only is not None:
            prefill = metadata.prefill_only
            slot_ids = prefill.non_spec_state_indices_tensor
            starts, ends = metadata.starts[decodes:], metadata.ends[decodes:]
            fold_and_fill(self.memory, slot_ids, starts, ends, phase_offset=self.phase_offset)
            end = decodes + prefill.num_prefill_tokens
            parts = (x[decodes:end] for x in (mixed_qkv, b, a, out))
            stock._cpu_gdn_attention_nonspec(self, prefill, *parts)

    def _decode(self, metadata: DeltaLogGDNMetadata, qkv: Tensor, b: Tensor, a: Tensor, out: Tensor) -> None:
        assert metadata.non_spec_state_indices_tensor is not None
        assert metadata.starts is not None
        slot_ids = metadata.non_spec_state_indices_tensor[: metadata.num_decodes]
        q, k, v = self.rearrange_mixed_qkv(self._update_conv(qkv, slot_ids))
        decay_ln, beta = gdn_gates(a, b, self.A_log, self.dt_bias)
        positions = metadata.starts[: metadata.num_decodes]
        gdn_step(
            q[0],
            k[0],
            v[0],
            decay_ln,
            beta,
            memory=self.memory,
            slot_ids=slot_ids,
            positions=positions,
            phase_offset=self.phase_offset,
            out=out,
        )

    def _update_conv(self, qkv: Tensor, slot_ids: Tensor) -> Tensor:
        """Causal convolution of one token a row [rows, channels], through vLLM's kernels."""
        states = self.kv_cache[0] if is_conv_state_dim_first() else self.kv_cache[0].transpose(1, 2)
        common = {"x": qkv.contiguous(), "bias": self.conv1d.bias, "conv_state_indices": slot_ids}
        # vLLM packs the weights for its C++ kernel at load time under this very condition.
        if torch.cpu._is_avx512_bf16_supported() or stock.is_arm_bf16():
            return stock._causal_conv1d_update_cpu(
                conv_states=states,
                weight=self.conv1d.weight,
                silu_activation=self.activation == "silu",
                is_weight_packed=True,
                **common,
            )
        weight = self.conv1d.weight.squeeze(1)
        return stock.causal_conv1d_update_cpu(
            conv_state=states, weight=weight, activation=self.activation, **common
        )


def _cpu_gdn_core(mixed_qkv: Tensor, b: Tensor, a: Tensor, core_out: Tensor, layer_name: str) -> None:
    """The part that torch.compile must not look into: it depends on the step's metadata."""
    context = get_forward_context()
    if context.attn_metadata is None:  # a profiling run, before there are pages
        return
    layer = context.no_compile_layers[layer_name]
    layer.forward_core(context.attn_metadata[layer_name], mixed_qkv, b, a, core_out)


direct_register_custom_op(op_name="deltalog_cpu_gdn_core", op_func=_cpu_gdn_core, mutates_args=["core_out"])
