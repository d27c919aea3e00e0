"""What the logs of this worker did: merges, live entries and bytes, from positions alone.

Nothing is read back from the device: a step's rows and their positions say which logs were appended
to, merged, folded and filled, and traffic.py says what that moves. The front end collects the totals by
``collective_rpc("deltalog_counters")``.
"""

from collections.abc import Sequence
from typing import Any

import torch

from deltalog_kernels import NULL_SLOT, LogLayout, traffic
from deltalog_kernels.layout import live_length, merges
from deltalog_kernels.traffic import Traffic

KINDS = ("append", "merge", "fold", "fill")


class StepCounters:
    """Totals over the steps of the layers that share one metadata builder."""

    def __init__(self, layout: LogLayout, num_layers: int) -> None:
        self.layout = layout
        self.num_layers = num_layers
        self.merges = 0
        self.live_entries = 0
        self.traffic = {kind: Traffic() for kind in KINDS}
        self.write_through = Traffic()

    def record(self, slot_ids: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, decodes: int) -> None:
        """Count one step: rows absorb positions [start, end), the first ``decodes`` of them as decodes.

        slot_ids, starts, ends [rows]; padding rows (<= NULL_SLOT) do not count.
        """
        real = slot_ids > NULL_SLOT
        decode, prefill = real.clone(), real.clone()
        decode[decodes:], prefill[:decodes] = False, False
        interval = self.layout.merge_interval
        self._record_decodes(live_length(starts[decode], interval))
        self.live_entries = self.num_layers * int(live_length(ends[decode], interval).sum())
        started = prefill & (starts > 0)
        for live, rows in _histogram(live_length(starts[started], interval), interval):
            if live:
                self.traffic["fold"] += traffic.merge(self.layout, live) * rows * self.num_layers
        for live, rows in _histogram(live_length(ends[prefill], interval), interval):
            self.traffic["fill"] += traffic.fill(self.layout, live) * rows * self.num_layers

    def _record_decodes(self, live_lengths: torch.Tensor) -> None:
        for live, rows in _histogram(live_lengths, self.layout.merge_interval):
            steps = rows * self.num_layers
            merging = bool(merges(live, self.layout.merge_interval))
            self.merges += steps * merging
            self.traffic["merge" if merging else "append"] += traffic.step(self.layout, live) * steps
            self.write_through += traffic.write_through(self.layout) * steps


def _histogram(live_lengths: torch.Tensor, merge_interval: int) -> list[tuple[int, int]]:
    """(live length, rows) for each length that occurs."""
    counts = torch.bincount(live_lengths.long(), minlength=merge_interval).tolist()
    return [(live, rows) for live, rows in enumerate(counts) if rows]


def snapshot(parts: Sequence[StepCounters]) -> dict[str, Any]:
    """Totals of a worker since it started, as plain numbers; ``parts`` is one for each metadata builder.

    merges counts each layer's log; live_entries is the state after the last step, over its decode rows
    and all layers; bytes are this tensor-parallel rank's share. write_through_bytes is what the
    baseline would have moved for the same decode tokens.
    """
    total = {kind: sum((part.traffic[kind] for part in parts), Traffic()) for kind in KINDS}
    write_through = sum((part.write_through for part in parts), Traffic())
    return {
        "merge_interval": parts[0].layout.merge_interval,
        "merges": sum(part.merges for part in parts),
        "live_entries": sum(part.live_entries for part in parts),
        "state_bytes": {
            "read": {kind: moved.read_bytes for kind, moved in total.items()},
            "write": {kind: moved.write_bytes for kind, moved in total.items()},
        },
        "write_through_bytes": {"read": write_through.read_bytes, "write": write_through.write_bytes},
    }


class WorkerStats:
    """Mixed into vLLM's worker as its extension class."""

    model_runner: Any

    def deltalog_counters(self) -> dict[str, Any]:
        """See ``snapshot``. Raises RuntimeError in a worker that decodes without DeltaLog."""
        builders = (
            builder
            for groups in self.model_runner.attn_groups
            for group in groups
            for builder in group.metadata_builders
        )
        parts = [builder.step_counters for builder in builders if hasattr(builder, "step_counters")]
        if not parts:
            raise RuntimeError(
                "expected layers that decode through DeltaLog; got none in this worker; "
                "ask for its counters only when `deltalog` is in additional_config"
            )
        return snapshot(parts)
