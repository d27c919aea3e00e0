"""Curves as a PNG. matplotlib is in the extra `bench` and is imported when a plot is drawn."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deltalog_kernels.bench import BenchError


@dataclass(frozen=True)
class Curve:
    """x grows by factors of two; ``ours`` is drawn thick, what it stands beside dashed."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    ours: bool = True

    @classmethod
    def through(cls, label: str, points: Mapping[int, float], *, ours: bool = True) -> "Curve":
        """y by x."""
        return cls(label, tuple(points), tuple(points.values()), ours)


def draw(
    path: Path, title: str, labels: tuple[str, str], panels: Mapping[str, Sequence[Curve]], *, log_y: bool
) -> None:
    """One panel beside the other, each with its curves; ``labels`` are those of the two axes."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise BenchError(
            f"expected matplotlib to draw {path}, found none; pip install -e '.[bench]' here or "
            "elsewhere, and `deltalog bench plot` draws it from the JSON"
        ) from None

    figure = Figure(figsize=(5.5 * len(panels), 4.5), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (name, curves) in zip(axes, panels.items(), strict=True):
        for curve in curves:
            style, width = ("o-", 2.2) if curve.ours else (".--", 1.2)
            axis.plot(curve.x, curve.y, style, linewidth=width, label=curve.label)
        axis.set_xscale("log", base=2)
        ticks = sorted({x for curve in curves for x in curve.x})
        axis.set_xticks(ticks, [f"{x:g}" for x in ticks])
        if log_y:
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=0)
        axis.set(title=name, xlabel=labels[0], ylabel=labels[1])
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    figure.savefig(path, dpi=150)
