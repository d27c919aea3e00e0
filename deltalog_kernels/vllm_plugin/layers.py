"""Recurrent layers with a log: decode rows are ours, prefill rows go to vLLM's own kernel."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.custom_op import PluggableLayer
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention as cpu_ops
from vllm.platforms import current_platform
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.attention.backend import AttentionBackend

from deltalog_kernels import LogLayout, SlotMemory, fold_and_fill, gdn_fused_step
from deltalog_kernels.vllm_plugin.metadata import DeltaLogGDNBackend, DeltaLogGDNMetadata
from deltalog_kernels.vllm_plugin.pages import log_states, phase_offset, recurrent_layout


class LoggedLayer:
    """Mixed into one of vLLM's recurrent layers: its page holds a log behind vLLM's two states."""

    stock: ClassVar[type[Any]]
    logged = False
    layout: LogLayout
    phase_offset: int
    memory: SlotMemory
    kv_cache: tuple[Tensor, ...]
    prefix: str

    def __init__(self, config: Any, vllm_config: VllmConfig, prefix: str = "", **kwargs: Any) -> None:
        layout, stock = recurrent_layout(vllm_config), self.stock
        if layout is None:
            # vLLM replaces the class for every engine of the process; this one did not ask for it.
            self.__class__ = stock
        stock.__init__(self, config, vllm_config, prefix, **kwargs)
        if layout is not None:
            self.layout = layout
            self.phase_offset = phase_offset(vllm_config, prefix)
            self.logged = True

    def get_state_shape(self) -> Iterable[tuple[int, ...]]:
        return (*self.stock.get_state_shape(self), *log_states(self.layout)[0])

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        states: tuple[torch.dtype, ...] = self.stock.get_state_dtype(self)
        if not self.logged:
            return states  # vLLM's own code asks, for its two
        # Kimi's own layer does not ask for the dtype that its model sizes the page with.
        return (states[0], self.layout.state_dtype, *log_states(self.layout)[1])

    def get_attn_backend(self) -> type[AttentionBackend]:
        return DeltaLogGDNBackend

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        self.stock.bind_kv_cache(self, kv_cache)
        if self.layout.capacity:
            _, base, *log = self.kv_cache
            if current_platform.is_cpu():
                # vLLM's CPU kernels keep each head's state K-major in storage that it declares [V, K].
                heads, dims = self.layout.value_heads, (self.layout.key_dim, self.layout.value_dim)
                base = base.view(-1, heads, *dims).transpose(-1, -2)
            self.memory = SlotMemory(self.layout, base, *log)

    def step_metadata(self) -> DeltaLogGDNMetadata | None:
        """This layer's part of the step; None in a profiling run, before there are pages."""
        metadata = get_forward_context().attn_metadata
        return metadata.get(self.prefix) if isinstance(metadata, dict) else None

    def conv_state(self) -> Tensor:
        """[slots, channels, width - 1]"""
        return self.kv_cache[0] if is_conv_state_dim_first() else self.kv_cache[0].transpose(-1, -2)

    def decode_at(self, metadata: DeltaLogGDNMetadata, rows: int) -> dict[str, Any]:
        """Where the first ``rows`` rows decode, as the steps of deltalog_kernels take it."""
        assert metadata.non_spec_state_indices_tensor is not None
        assert metadata.starts is not None
        return {
            "memory": self.memory,
            "slot_ids": metadata.non_spec_state_indices_tensor[:rows],
            "positions": metadata.starts[:rows],
            "phase_offset": self.phase_offset,
        }

    def fold(self, metadata: DeltaLogGDNMetadata) -> None:
        """Leave the prefill rows dense bases, and neutral entries where their logs will count as live."""
        assert metadata.prefill_only is not None
        assert metadata.prefill_only.non_spec_state_indices_tensor is not None
        assert metadata.starts is not None
        assert metadata.ends is not None
        first, count = metadata.num_decodes, metadata.num_prefills
        slot_ids = metadata.prefill_only.non_spec_state_indices_tensor[:count]
        starts, ends = metadata.starts[first:], metadata.ends[first:]
        fold_and_fill(self.memory, slot_ids, starts, ends, phase_offset=self.phase_offset)

    @contextmanager
    def prefill_alone(self, metadata: DeltaLogGDNMetadata) -> Iterator[None]:
        """Show vLLM's own layer a batch of the prefill rows, and the states that it knows."""
        step, states = get_forward_context().attn_metadata, self.kv_cache
        assert isinstance(step, dict)
        step[self.prefix], self.kv_cache = metadata.prefill_only, states[:2]
        try:
            yield
        finally:
            step[self.prefix], self.kv_cache = metadata, states


@PluggableLayer.register_oot(name="QwenGatedDeltaNetAttention")
class DeltaLogQwenGDN(LoggedLayer, QwenGatedDeltaNetAttention):
    """QwenGatedDeltaNetAttention with a log."""

    stock = QwenGatedDeltaNetAttention

    def _forward_core(self, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
        """vLLM's seam on a GPU: convolution and recurrence of one step, out [tokens, HV, V]."""
        metadata = self.step_metadata()
        if metadata is None or not self.layout.capacity:
            super()._forward_core(mixed_qkv, b, a, core_attn_out)
            return
        decodes = metadata.num_decodes
        # A batch that a FULL CUDA graph decodes is padded; the slots of its padding are null.
        rows = decodes if metadata.num_prefills else metadata.num_actual_tokens
        if rows:
            at = self.decode_at(metadata, rows)
            weight = self.conv1d.weight.view(self.conv1d.weight.size(0), self.conv1d.weight.size(2))
            qkv = causal_conv1d_update(
                mixed_qkv[:rows],
                self.conv_state(),
                weight,
                self.conv1d.bias,
                self.activation,
                conv_state_indices=at["slot_ids"],
                validate_data=False,
            )
            gates = (a[:rows], b[:rows], self.A_log, self.dt_bias)
            gdn_fused_step(qkv, *gates, **at, out=core_attn_out[:rows])
        if metadata.prefill_only is not None:
            self.fold(metadata)
            with self.prefill_alone(metadata):
                super()._forward_core(*(x[decodes:] for x in (mixed_qkv, b, a, core_attn_out)))

    def _warmup_prefill_kernels(self, *args: Any) -> None:
        """vLLM's own, which asks for the dtypes of its two states."""
        self.logged = False
        super()._warmup_prefill_kernels(*args)
        self.logged = True

    def forward_cpu(self, hidden_states: Tensor) -> Tensor:
        """vLLM's projections around our core; hidden_states [tokens, hidden]."""
        qkvz, _ = self.in_proj_qkvz(hidden_states)
        ba, _ = self.in_proj_ba(hidden_states)
        q, k, v, z, b, a = self.fix_query_key_value_ordering(qkvz, ba)
        mixed_qkv = torch.cat([part.flatten(1) for part in (q, k, v)], dim=-1)
        core_out = torch.zeros_like(z)
        torch.ops.vllm.deltalog_cpu_gdn_core(mixed_qkv, b, a, core_out, self.prefix)
        return self._output_projection(core_out, z)

    def forward_core_cpu(
        self, metadata: DeltaLogGDNMetadata, mixed_qkv: Tensor, b: Tensor, a: Tensor, out: Tensor
    ) -> None:
        """As _forward_core, on vLLM's CPU kernels; out [tokens, HV, V] is written for actual tokens."""
        if not self.layout.capacity:
            cpu_ops._cpu_gdn_attention_nonspec(self, metadata, mixed_qkv, b, a, out)
            return
        decodes = metadata.num_decodes
        if decodes:
            at = self.decode_at(metadata, decodes)
            qkv = self._update_conv_cpu(mixed_qkv[:decodes], at["slot_ids"])
            gates = (a[:decodes], b[:decodes], self.A_log, self.dt_bias)
            gdn_fused_step(qkv, *gates, **at, out=out[:decodes])
        if metadata.prefill_only is not None:
            self.fold(metadata)
            end = decodes + metadata.num_prefill_tokens
            parts = (x[decodes:end] for x in (mixed_qkv, b, a, out))
            cpu_ops._cpu_gdn_attention_nonspec(self, metadata.prefill_only, *parts)

    def _update_conv_cpu(self, qkv: Tensor, slot_ids: Tensor) -> Tensor:
        """Causal convolution of one token a row [rows, channels], through vLLM's kernels."""
        states = self.kv_cache[0] if is_conv_state_dim_first() else self.kv_cache[0].transpose(1, 2)
        common = {"x": qkv.contiguous(), "bias": self.conv1d.bias, "conv_state_indices": slot_ids}
        # vLLM packs the weights for its C++ kernel at load time under this very condition.
        if torch.cpu._is_avx512_bf16_supported() or cpu_ops.is_arm_bf16():
            return cpu_ops._causal_conv1d_update_cpu(
                conv_states=states,
                weight=self.conv1d.weight,
                silu_activation=self.activation == "silu",
                is_weight_packed=True,
                **common,
            )
        weight = self.conv1d.weight.squeeze(1)
        return cpu_ops.causal_conv1d_update_cpu(
            conv_state=states, weight=weight, activation=self.activation, **common
        )


def _cpu_gdn_core(mixed_qkv: Tensor, b: Tensor, a: Tensor, core_out: Tensor, layer_name: str) -> None:
    """The part that torch.compile must not look into: it depends on the step's metadata."""
    context = get_forward_context()
    if context.attn_metadata is None:  # a profiling run, before there are pages
        return
    layer = context.no_compile_layers[layer_name]
    layer.forward_core_cpu(context.attn_metadata[layer_name], mixed_qkv, b, a, core_out)


direct_register_custom_op(op_name="deltalog_cpu_gdn_core", op_func=_cpu_gdn_core, mutates_args=["core_out"])
