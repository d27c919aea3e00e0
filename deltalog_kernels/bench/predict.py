"""What a GPU that nobody has measured would take, from its data sheet and a run on one that somebody has."""

from typing import Any

from rich.table import Table

from deltalog_kernels import traffic
from deltalog_kernels.bench import BenchError, report

RTX_4090_BYTES_PER_S = 1008e9
"""GDDR6X at 21 Gb/s on 384 lines, by the data sheet."""


def rtx_4090(measured: dict[str, Any]) -> list[dict[str, Any]]:
    """Predicted milliseconds of a step for every result of a run whose case is still in report.cases().

    The bytes of traffic.py at the data sheet's rate, over the roofline share that the measured GPU reached
    for the same shape. That share is of what a stream reached there; no stream on a 4090 will reach its
    data sheet, so the prediction is rather too short. Small batches wait for latency, not for bytes: there
    it says least.
    """
    known = {(case.name, case.batch): case for case in report.cases()}
    predictions = []
    for result in measured.get("results", []):
        if (case := known.get((result["case"], result["batch"]))) is None:
            continue
        roof_s = case.batch * traffic.mean_step_s(case.layout, RTX_4090_BYTES_PER_S, RTX_4090_BYTES_PER_S)
        share = result["roofline_share"]
        prediction = {"case": case.name, "batch": case.batch, "roofline_share": share}
        predictions.append(prediction | {"predicted_ms": roof_s * 1e3 / share})
    if not predictions:
        raise BenchError(
            "expected what `deltalog bench kernels --output` wrote, got JSON without a case that this "
            "version knows; run the bench again"
        )
    return predictions


def table(measured: dict[str, Any]) -> Table:
    """The predictions, labelled as such."""
    predictions = rtx_4090(measured)
    title = f"RTX 4090, PREDICTED from {measured['machine']} at commit {measured['commit']}: not measured"
    built = Table("layer", "B", "roofline share there", "predicted ms a step", title=title)
    for row in predictions:
        built.add_row(
            row["case"], str(row["batch"]), f"{row['roofline_share']:.0%}", f"{row['predicted_ms']:.4f}"
        )
    return built
