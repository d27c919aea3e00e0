"""What a step's batch means for the logs: positions of its rows, and the part that is prefill."""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.gdn_attn import (
    GDNAttentionBackend,
    GDNAttentionMetadata,
    GDNAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.utils import compute_causal_conv1d_metadata

from deltalog_kernels.vllm_plugin.pages import phase_offset, recurrent_layout
from deltalog_kernels.vllm_plugin.stats import Absorbed, StepCounters


@dataclass
class DeltaLogGDNMetadata(GDNAttentionMetadata):
    """vLLM's metadata, whose rows are ordered decodes first, and what the log needs beside it.

    starts, ends: row i absorbs the tokens at positions [starts[i], ends[i]). In a batch that a FULL CUDA
        graph decodes, starts is the builder's own buffer, padded like the slot ids, 0 where they are null.
    prefill_only: the prefill rows alone, as vLLM's own layer wants them; None without any.
    absorbed: the same positions on the host, to be counted; None for a batch that nobody asked for.
    """

    starts: Tensor | None = None
    ends: Tensor | None = None
    prefill_only: GDNAttentionMetadata | None = None
    absorbed: Absorbed | None = None


class DeltaLogGDNMetadataBuilder(GDNAttentionMetadataBuilder):
    """Adds positions to each step's metadata and counts the step."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layout = recurrent_layout(vllm_config)
        assert layout is not None, "only a DeltaLog layer asks for this builder"
        self.step_counters = StepCounters(layout, [phase_offset(vllm_config, name) for name in layer_names])
        # vLLM's own condition, which asks for its own class.
        self.supports_update_block_table = vllm_config.use_v2_model_runner and device.type == "cuda"
        if self.supports_update_block_table:
            self.mamba_aligned_state_indices: Tensor | None = None
        self.positions = torch.zeros(self.decode_cudagraph_max_bs, dtype=torch.int32, device=device)
        self.capturing = False

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> GDNAttentionMetadata:
        self.capturing = True
        try:
            return super().build_for_cudagraph_capture(common_attn_metadata)
        finally:
            self.capturing = False

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, *args: Any, **kwargs: Any
    ) -> DeltaLogGDNMetadata:
        common = common_attn_metadata
        stock = _with_dense_slots(super().build(common_prefix_len, common, *args, **kwargs))
        decodes, rows = stock.num_decodes, stock.num_decodes + stock.num_prefills
        ends = common.seq_lens[:rows]
        starts = ends - common.query_start_loc[: rows + 1].diff()
        if self._stage_decode(stock.num_prefills, decodes, stock.num_spec_decodes):
            starts = self._staged(starts, stock)
        absorbed = None
        if not self.capturing:
            assert common.seq_lens_cpu_upper_bound is not None
            absorbed = Absorbed.of(
                common.seq_lens_cpu_upper_bound[:rows], common.query_start_loc_cpu[: rows + 1], decodes
            )
            self.step_counters.record(absorbed)
        return DeltaLogGDNMetadata(
            **{field.name: getattr(stock, field.name) for field in fields(stock)},
            starts=starts,
            ends=ends,
            prefill_only=_prefill_only(stock, common) if rows > decodes else None,
            absorbed=absorbed,
        )

    def update_block_table(
        self, metadata: GDNAttentionMetadata, blk_table: Tensor, slot_mapping: Tensor
    ) -> GDNAttentionMetadata:
        """The same batch for another group of layers: its slots differ, its positions do not."""
        updated = _with_dense_slots(super().update_block_table(metadata, blk_table, slot_mapping))
        assert isinstance(updated, DeltaLogGDNMetadata)
        if updated.absorbed is not None:
            self.step_counters.record(updated.absorbed)
        if updated.prefill_only is not None:
            slots = updated.prefill_state_indices
            updated.prefill_only = replace(
                updated.prefill_only, non_spec_state_indices_tensor=slots, prefill_state_indices=slots
            )
        return updated

    def _staged(self, starts: Tensor, stock: GDNAttentionMetadata) -> Tensor:
        """The positions where a captured graph reads them. What a larger batch left behind is cleared."""
        assert stock.non_spec_state_indices_tensor is not None
        staged = self.positions[: len(stock.non_spec_state_indices_tensor)]
        staged[: len(starts)].copy_(starts, non_blocking=True)
        staged[len(starts) :].zero_()
        return staged


def _with_dense_slots(metadata: GDNAttentionMetadata) -> GDNAttentionMetadata:
    """Slot ids side by side, as our kernels read them: vLLM's are a column of its block table."""
    slots = metadata.non_spec_state_indices_tensor
    if slots is None or slots.is_contiguous():
        return metadata
    slots = slots.contiguous()
    prefill = None if metadata.prefill_state_indices is None else slots[metadata.num_decodes :]
    return replace(metadata, non_spec_state_indices_tensor=slots, prefill_state_indices=prefill)


def _prefill_only(mixed: GDNAttentionMetadata, common: CommonAttentionMetadata) -> GDNAttentionMetadata:
    if not mixed.num_decodes:
        return mixed
    assert mixed.has_initial_state is not None
    assert mixed.prefill_query_start_loc is not None
    starts = common.query_start_loc_cpu[mixed.num_decodes :] - mixed.num_decode_tokens
    nums_dict, batch_ptr, offsets = mixed.nums_dict, mixed.batch_ptr, mixed.token_chunk_offset_ptr
    if nums_dict is not None:
        device = mixed.prefill_query_start_loc.device
        nums_dict, batch_ptr, offsets = compute_causal_conv1d_metadata(starts, device=device)
    return replace(
        mixed,
        num_decodes=0,
        num_decode_tokens=0,
        num_actual_tokens=mixed.num_prefill_tokens,
        has_initial_state=mixed.has_initial_state[mixed.num_decodes :],
        non_spec_query_start_loc=mixed.prefill_query_start_loc,
        non_spec_state_indices_tensor=mixed.prefill_state_indices,
        nums_dict=nums_dict,
        batch_ptr=batch_ptr,
        token_chunk_offset_ptr=offsets,
    )


class DeltaLogGDNBackend(GDNAttentionBackend):
    @staticmethod
    def get_builder_cls() -> type[GDNAttentionMetadataBuilder]:
        return DeltaLogGDNMetadataBuilder
