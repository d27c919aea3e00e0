"""What the plugin would do for a model: `deltalog doctor MODEL`. Loads no weights."""

from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from deltalog_kernels import LogLayout, traffic
from deltalog_kernels.layout import MAX_MERGE_INTERVAL
from deltalog_kernels.vllm_plugin.config import SECTION
from deltalog_kernels.vllm_plugin.pages import recurrent_layers, recurrent_layout
from deltalog_kernels.vllm_plugin.support import aside

H200_READ, H200_COPY = 4.39e12, 4.25e12
"""Bytes a second that a stream reached on an H200 (bench/results), for the predicted times."""
GIB = 2**30


@dataclass(frozen=True)
class Diagnosis:
    """``aside``: why vLLM would decode as stock; then the rest is of no use."""

    architecture: str
    layers: int
    aside: str | None
    layout: LogLayout | None

    @property
    def base_bytes(self) -> int:
        """Base states of a request, all recurrent layers of this rank."""
        assert self.layout is not None
        return self.layers * self.layout.base_bytes

    @property
    def log_bytes(self) -> int:
        """Logs of a request, all recurrent layers of this rank."""
        assert self.layout is not None
        return self.layers * self.layout.log_bytes

    def recurrent_ms(self, rows: int) -> tuple[float, float]:
        """Predicted milliseconds of all recurrent layers in a step on an H200, write-through and with the log
        (the mean over a cycle): bytes at the rate of a stream. Small batches wait for latency instead."""
        assert self.layout is not None
        through = replace(self.layout, merge_interval=1)
        per_row = [traffic.mean_step_s(each, H200_READ, H200_COPY) for each in (through, self.layout)]
        return (1e3 * rows * self.layers * per_row[0], 1e3 * rows * self.layers * per_row[1])


def diagnose(model: Path, merge_interval: int | str) -> Diagnosis:
    """Raises ValueError where the plugin would refuse the engine."""
    section = {SECTION: {"merge_interval": merge_interval}}
    config: VllmConfig = EngineArgs(str(model), additional_config=section).create_engine_config()
    return Diagnosis(
        config.model_config.architecture, recurrent_layers(config), aside(config), recurrent_layout(config)
    )


def show(found: Diagnosis, asked: int | str, console: Console) -> None:
    """In words and a table."""
    layout = found.layout
    if found.aside or layout is None:
        console.print(f"{found.architecture}: decodes as stock vLLM: {found.aside}", markup=False)
        return
    chosen = (
        f"the smallest power of two whose mean step moves at most {traffic.AUTO_TOLERANCE - 1:.0%} more "
        "bytes than the best M's"
        if asked == "auto"
        else f"as asked; auto would take {traffic.best_merge_interval(layout)}"
    )
    lines = [
        f"{found.architecture}: {found.layers} {layout.family.name} layers decode with a log",
        f"M = {layout.merge_interval}: {chosen} (1 to {MAX_MERGE_INTERVAL} are taken)",
        f"state of a request: {found.base_bytes / 2**20:.2f} MiB base, {found.log_bytes / 2**20:.2f} MiB log "
        f"({found.log_bytes / found.base_bytes:.1%} more)",
        f"requests whose states fit a GiB: {GIB // found.base_bytes} without the log, "
        f"{GIB // (found.base_bytes + found.log_bytes)} with it",
    ]
    for line in lines:
        console.print(line, markup=False, highlight=False)
    built = Table("B", "write-through ms", "with the log ms", "times faster",
                  title="recurrent layers of a step, PREDICTED for an H200 from bytes")  # fmt: skip
    for rows in (32, 64, 128, 256, 512):
        through, ours = found.recurrent_ms(rows)
        built.add_row(str(rows), f"{through:.3f}", f"{ours:.3f}", f"{through / ours:.2f}x")
    console.print(built)
