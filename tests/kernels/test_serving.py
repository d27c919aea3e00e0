"""`deltalog bench serving` without vLLM: a program in the place of its engines that reports made-up times."""

import json

import pytest
from typer.testing import CliRunner

from deltalog_kernels import cli
from deltalog_kernels.bench import report, serving

# Stock takes 20 ms and 0.1 ms a row, ours the same and 0.06 ms; no more than 64 rows fit.
ENGINE = """
import json, sys
job = json.load(sys.stdin)
row_ms = 0.1 if job["merge_interval"] is None else 0.06
for batch in job["batches"]:
    if batch > 64:
        sys.exit("the requests did not fit at once")
    point = {
        "batch": batch,
        "step_ms": [20 + row_ms * batch + step for step in (-1, 0, 0, 1)],
        "merges": 3 * batch,
        "state_write_bytes": 10**6 * batch,
        "merge_interval": job["merge_interval"],
        "gpu_ms": 18.0,
        "recurrent_ms": (row_ms - 0.02) * batch,
    }
    with open(sys.argv[1], "a") as file:
        file.write(json.dumps(point) + "\\n")
"""
MACHINE = {"machine": "made up", "commit": "abc", "vllm": "0"}


@pytest.fixture(autouse=True)
def made_up_engine(monkeypatch, tmp_path):
    (tmp_path / "made_up_engine.py").write_text(ENGINE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(serving, "RUNNER", "made_up_engine")
    monkeypatch.setattr(report, "machine", lambda commit: MACHINE)
    monkeypatch.setattr(cli, "version", lambda package: "0")


def bench(folder, *options):
    arguments = ["bench", "serving", str(folder), *options, "--output", str(folder / "out.json")]
    return CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "200"})


def test_both_sides_of_every_batch_are_compared(tmp_path):
    ran = bench(tmp_path, "--batches", "10,64", "--merge-interval", "8", "--pairs", "2")
    assert ran.exit_code == 0, ran.output
    [ten, _] = json.loads((tmp_path / "out.json").read_text())["results"]
    assert ten["stock"]["tpot_ms"] == pytest.approx(21)
    assert ten["deltalog"]["tpot_ms"] == pytest.approx(20.6)
    assert ten["speed_ups"] == pytest.approx([21 / 20.6] * 2)
    # Of 21 ms the recurrent kernel had 0.8; with a log it has 0.4.
    assert ten["ceiling"] == pytest.approx(21 / 20.6)
    assert ten["stock"]["p99_ms"] == pytest.approx(22)
    assert (ten["merge_interval"], ten["merges"]) == (8, 30)
    [line] = [line for line in ran.output.splitlines() if line.startswith("cost: ")]
    assert json.loads(line.removeprefix("cost: ")) == pytest.approx(
        {"fixed_ms": 20, "row_ms": 0.02, "state_ms": 0.04, "write_through_state_ms": 0.08}
    )


def test_what_was_measured_before_a_batch_that_does_not_fit_is_kept(tmp_path):
    ran = bench(tmp_path, "--batches", "10,128")
    assert ran.exit_code == 1
    assert "did not fit at once" in ran.output
    assert not (tmp_path / "out.json").exists(), "the other side has measured nothing yet"
    runs = serving.nothing_measured(serving.Job(
        model="m", merge_interval=8, batches=[10, 64], prompt_tokens=2, steps=4))  # fmt: skip
    point = serving.Point(batch=10, step_ms=[1.0], merges=0, state_write_bytes=0, merge_interval=None)
    runs["stock"][10] = [point, point]
    runs["deltalog"][10] = [point]
    assert [row["batch"] for row in serving.rows(runs)] == [10]


def test_a_plot_of_both_sides(tmp_path):
    pytest.importorskip("matplotlib")
    assert bench(tmp_path, "--batches", "10,64", "--merge-interval", "8").exit_code == 0
    ran = CliRunner().invoke(cli.app, ["bench", "plot", str(tmp_path / "out.json")])
    assert ran.exit_code == 0, ran.output
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("option", "given", "expected"),
    [
        ("--engine-args", "[1]", "expected a JSON object"),
        ("--engine-args", "{", "expected a JSON object"),
        ("--batches", "8,", "expected numbers of requests"),
        ("--batches", "0", "expected numbers of requests"),
        ("--batches", "many", "expected numbers of requests"),
    ],
)
def test_a_wrong_option_is_refused_before_an_engine_starts(tmp_path, option, given, expected):
    ran = bench(tmp_path, option, given)
    assert ran.exit_code == 2
    assert expected in ran.output
