"""Faults that the engine tests must notice, put between the plugin and its kernels on either platform."""

from typing import Any

import pytest
import torch

from deltalog_kernels import SlotMemory
from deltalog_kernels.layout import live_length
from deltalog_kernels.vllm_plugin import layers, metadata


def without_fold(patch: pytest.MonkeyPatch) -> None:
    """What is live before a prefill is lost."""
    real = layers.fold_and_fill

    def fill_alone(memory: SlotMemory, slot_ids: Any, starts: Any, ends: Any, *, phase_offset: int) -> None:
        real(memory, slot_ids, torch.zeros_like(starts), ends, phase_offset=phase_offset)

    patch.setattr(layers, "fold_and_fill", fill_alone)


def without_fill(patch: pytest.MonkeyPatch) -> None:
    """What counts as live after a prefill is whatever the page held."""
    real = layers.fold_and_fill

    def fold_alone(memory: SlotMemory, slot_ids: Any, starts: Any, ends: Any, *, phase_offset: int) -> None:
        interval = memory.layout.merge_interval
        empty = torch.full_like(ends, interval - phase_offset % interval)
        real(memory, slot_ids, starts, empty, phase_offset=phase_offset)

    patch.setattr(layers, "fold_and_fill", fold_alone)


def without_merge(patch: pytest.MonkeyPatch) -> None:
    """The token that should merge is appended over the last entry."""
    real = layers.LoggedLayer.decode_at

    def never_merge(self: Any, *arguments: Any) -> dict[str, Any]:
        at, last = real(self, *arguments), self.layout.merge_interval - 1
        merging = live_length(at["positions"], last + 1, at["phase_offset"]) == last
        return at | {"positions": at["positions"] - merging.to(at["positions"].dtype)}

    patch.setattr(layers.LoggedLayer, "decode_at", never_merge)


def with_stale_positions(patch: pytest.MonkeyPatch) -> None:
    """A captured graph reads the positions of the first batch for ever."""
    builder, written = metadata.DeltaLogGDNMetadataBuilder, set()
    real = builder._staged

    def once(self: Any, starts: Any, stock: Any) -> Any:
        if id(self) in written:
            return self.positions[: len(stock.non_spec_state_indices_tensor)]
        if not self.capturing:
            written.add(id(self))
        return real(self, starts, stock)

    patch.setattr(builder, "_staged", once)


def with_real_padding(patch: pytest.MonkeyPatch) -> None:
    """Rows of padding decode into the slot of the first row."""
    real = layers.LoggedLayer.decode_at

    def decode_at(self: Any, *arguments: Any) -> dict[str, Any]:
        at = real(self, *arguments)
        slots = at["slot_ids"]
        return at | {"slot_ids": torch.where(slots == 0, slots[0], slots)}

    patch.setattr(layers.LoggedLayer, "decode_at", decode_at)
