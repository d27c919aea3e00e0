"""What a step's batch means for the logs: positions of its rows, and the part that is prefill."""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.gdn_attn import (
    GDNAttentionBackend,
    GDNAttentionMetadata,
    GDNAttentionMetadataBuilder,
)

from deltalog_kernels.vllm_plugin.pages import gdn_layout, phase_offset
from deltalog_kernels.vllm_plugin.stats import StepCounters


@dataclass
class DeltaLogGDNMetadata(GDNAttentionMetadata):
    """vLLM's metadata, whose rows are ordered decodes first, and what the log needs beside it.

    starts, ends [num_decodes + num_prefills]: each row absorbs the tokens at positions [start, end).
    prefill_only: the prefill rows alone, as vLLM's own layer wants them; None without any.
    """

    starts: torch.Tensor | None = None
    ends: torch.Tensor | None = None
    prefill_only: GDNAttentionMetadata | None = None


class DeltaLogGDNMetadataBuilder(GDNAttentionMetadataBuilder):
    """Adds positions to each step's metadata and counts the step."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layout = gdn_layout(vllm_config)
        assert layout is not None, "only a DeltaLog layer asks for this builder"
        self.step_counters = StepCounters(layout, [phase_offset(vllm_config, name) for name in layer_names])

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, *args: Any, **kwargs: Any
    ) -> DeltaLogGDNMetadata:
        stock = super().build(common_prefix_len, common_attn_metadata, *args, **kwargs)
        decodes, rows = stock.num_decodes, stock.num_decodes + stock.num_prefills
        ends = common_attn_metadata.seq_lens[:rows]
        starts = ends - common_attn_metadata.query_start_loc[: rows + 1].diff()
        slot_ids = stock.non_spec_state_indices_tensor
        assert slot_ids is not None
        self.step_counters.record(slot_ids[:rows], starts, ends, decodes)
        inherited = {field.name: getattr(stock, field.name) for field in fields(stock)}
        return DeltaLogGDNMetadata(
            **inherited,
            starts=starts,
            ends=ends,
            prefill_only=_prefill_only(stock) if rows > decodes else None,
        )


def _prefill_only(mixed: GDNAttentionMetadata) -> GDNAttentionMetadata:
    assert mixed.has_initial_state is not None
    return replace(
        mixed,
        num_decodes=0,
        num_decode_tokens=0,
        num_actual_tokens=mixed.num_prefill_tokens,
        has_initial_state=mixed.has_initial_state[mixed.num_decodes :],
        non_spec_query_start_loc=mixed.prefill_query_start_loc,
        non_spec_state_indices_tensor=mixed.prefill_state_indices,
    )


class DeltaLogGDNBackend(GDNAttentionBackend):
    @staticmethod
    def get_builder_cls() -> type[GDNAttentionMetadataBuilder]:
        return DeltaLogGDNMetadataBuilder
