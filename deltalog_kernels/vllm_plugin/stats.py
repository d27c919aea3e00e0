"""What the logs of this worker did: merges, live entries and bytes, from positions alone.

Nothing is read back from the device: a step's rows and their positions say which logs were appended
to, merged, folded and filled, and traffic.py says what that moves. The front end collects the totals by
``collective_rpc("deltalog_counters")``.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig

from deltalog_kernels import LogLayout, traffic
from deltalog_kernels.layout import live_length, merges
from deltalog_kernels.traffic import Traffic
from deltalog_kernels.vllm_plugin.config import DeltaLogConfig
from deltalog_kernels.vllm_plugin.support import aside

KINDS = ("append", "merge", "fold", "fill")


@dataclass(frozen=True)
class Absorbed:
    """What a step's rows absorb: row i the tokens at positions [starts[i], ends[i]), the first ``decodes``
    rows one token each as decodes. On the host, without rows of padding."""

    starts: torch.Tensor
    ends: torch.Tensor
    decodes: int

    @classmethod
    def of(cls, ends: torch.Tensor, query_start_loc: torch.Tensor, decodes: int) -> "Absorbed":
        """From the lengths of all rows [rows] and the starts of their tokens in the batch [rows + 1]; a row
        of padding has no tokens."""
        tokens = query_start_loc.diff()
        real = tokens > 0
        return cls((ends - tokens)[real], ends[real], int(real[:decodes].sum()))


class StepCounters:
    """Totals over the steps of the layers that share one metadata builder."""

    def __init__(self, layout: LogLayout, phase_offsets: Sequence[int]) -> None:
        """phase_offsets: of each layer."""
        self.layout = layout
        offsets = Counter(offset % layout.merge_interval for offset in phase_offsets)
        self.layers_by_offset = [offsets[n] for n in range(layout.merge_interval)]
        self.merges = 0
        self.live_entries = 0
        self.traffic = {kind: Traffic() for kind in KINDS}
        self.write_through = Traffic()

    def record(self, step: Absorbed) -> None:
        """Count one step."""
        for live, logs in self._logs_by_live_length(step.starts[: step.decodes]):
            merging = bool(merges(live, self.layout.merge_interval))
            self.merges += logs * merging
            self.traffic["merge" if merging else "append"] += traffic.step(self.layout, live) * logs
            self.write_through += traffic.write_through(self.layout) * logs
        decoded = self._logs_by_live_length(step.ends[: step.decodes])
        self.live_entries = sum(live * logs for live, logs in decoded)
        found = step.starts[step.decodes :]
        for live, logs in self._logs_by_live_length(found[found > 0]):
            if live:
                self.traffic["fold"] += traffic.merge(self.layout, live) * logs
        for live, logs in self._logs_by_live_length(step.ends[step.decodes :]):
            self.traffic["fill"] += traffic.fill(self.layout, live) * logs

    def _logs_by_live_length(self, positions: torch.Tensor) -> list[tuple[int, int]]:
        """(live length, logs of that length) over the rows [rows] at these positions and all layers."""
        interval = self.layout.merge_interval
        rows = torch.bincount(live_length(positions.long(), interval), minlength=interval).tolist()
        # A negative index counts from the end, which is the modulus here.
        logs = [
            sum(layers * rows[live - offset] for offset, layers in enumerate(self.layers_by_offset))
            for live in range(interval)
        ]
        return [(live, count) for live, count in enumerate(logs) if count]


def snapshot(parts: Sequence[StepCounters]) -> dict[str, Any]:
    """Totals of a worker since it started, vLLM's warm-up included, as plain numbers; ``parts`` holds one for
    each metadata builder.

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
    vllm_config: VllmConfig

    def deltalog_counters(self) -> dict[str, Any]:
        """See ``snapshot``; {"standing_aside": why} where the plugin leaves decode to vLLM.

        Raises RuntimeError in an engine without the section.
        """
        reason = DeltaLogConfig.from_vllm(self.vllm_config) and aside(self.vllm_config)
        if reason:
            return {"standing_aside": reason}
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
