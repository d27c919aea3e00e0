"""The GPU bench without a GPU: the torch steps in the place of the kernels, and a timer that does not time.

It runs everything once, and so shows what is checked, refused, printed and written; not one number means
anything.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from deltalog_kernels import GDN, KDA, RWKV6, LogLayout, cli, traffic
from deltalog_kernels.bench import BenchError, baselines, counters, gpu, predict, report, sweeps
from deltalog_kernels.bench.gpu import Case
from deltalog_kernels.bench.steps import deltalog_step, write_through

SMALL = LogLayout(GDN, 1, 2, 16, 16, 4)
LAYERS = (SMALL, LogLayout(KDA, 2, 2, 16, 16, 1), LogLayout(RWKV6, 2, 2, 16, 16, 1))
CEILINGS = {"read": 4000.0, "copy": 3600.0}


def published(wrong: float) -> baselines.Baseline:
    """Another project's kernel: the specification, with an error in its output."""

    def make(inputs, states, slot_ids):
        def step() -> torch.Tensor:
            out, _ = write_through(SMALL, inputs, states[slot_ids.long()].double())
            return (out * (1 + wrong)).bfloat16()

        return step

    return baselines.Baseline("wrong kernel" if wrong else "their kernel", make)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def graph_ms(launch) -> float:
        launch()
        return 1.0

    two_launch = SimpleNamespace(two_launch_step=deltalog_step)
    monkeypatch.setitem(sys.modules, "deltalog_kernels.bench.two_launch", two_launch)
    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    monkeypatch.setattr(gpu, "ROTATION_BYTES", 40_000)
    monkeypatch.setattr(gpu, "STEPS", 4)
    monkeypatch.setattr(gpu, "graph_ms", graph_ms)
    monkeypatch.setattr(gpu, "baselines", lambda *_: ([], ["other kernel: not installed"]))
    monkeypatch.setattr(report, "ceilings_gb_s", lambda: CEILINGS)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "no GPU")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def bench(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, ["bench", *arguments], env={"COLUMNS": "200"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.mark.usefixtures("no_gpu")
def test_a_case_is_timed_beside_what_passes_its_check(monkeypatch):
    monkeypatch.setattr(gpu, "baselines", lambda *_: ([published(0.0), published(0.1)], []))
    for batch in (1, 12):
        result, missing = gpu.measure(Case(SMALL, batch), CEILINGS)
        assert set(result["ms"]) == {"append", "merge", "cycle", "mixed"}
        assert set(result["baselines_ms"]) == {"deltalog M=1", "their kernel"}
        (line,) = missing
        assert "wrong kernel on gdn 1/2x16 float32 M=4: its output is off by" in line
        assert result["error"] < 1e-5


@pytest.mark.usefixtures("no_gpu")
def test_a_wrong_step_is_refused_and_not_timed(monkeypatch):
    check = gpu.check

    def wrong(layout, token, *rest):
        return deltalog_step(layout, replace(token, b=token.b + 1), *rest)

    monkeypatch.setattr(gpu, "check", lambda case: check(case, wrong))
    monkeypatch.setattr(gpu, "time_case", pytest.fail)
    with pytest.raises(BenchError, match=r"expected an error of 1e-05 at most, got .*; nothing was timed"):
        gpu.measure(Case(SMALL, 12), CEILINGS)


@pytest.mark.usefixtures("no_gpu")
def test_our_own_write_through_is_checked_before_it_is_timed(monkeypatch):
    checked, time_case = [], gpu.time_case

    def timed(case):
        assert case in checked
        return time_case(case)

    monkeypatch.setattr(gpu, "check", checked.append)
    monkeypatch.setattr(gpu, "time_case", timed)
    gpu.measure(Case(SMALL, 12), CEILINGS)
    assert [case.layout.merge_interval for case in checked] == [4, 1]


@pytest.mark.usefixtures("no_gpu")
def test_a_row_that_is_padding_must_come_out_zero():
    def smudging(layout, token, memory, slot_ids, out):
        step = deltalog_step(layout, token, memory, slot_ids, out)
        return lambda positions: step(positions).masked_fill_((slot_ids == 0)[:, None, None], 1)

    with pytest.raises(BenchError, match="nothing was timed"):
        gpu.check(Case(SMALL, 12), smudging)


@pytest.mark.usefixtures("no_gpu")
def test_the_table_and_the_json_name_what_got_slower(monkeypatch, tmp_path):
    monkeypatch.setattr(report, "cases", lambda: [Case(SMALL, 2), Case(LAYERS[1], 3)])
    monkeypatch.setattr(gpu, "time_baseline", lambda *_: 0.01)
    monkeypatch.setattr(gpu, "baselines", lambda *_: ([published(0.0)], ["other kernel: not installed"]))
    output = tmp_path / "result.json"
    status, said = bench("kernels", "--output", str(output), "--commit", "abc")
    assert status == 0
    assert "slower than write-through: gdn 1/2x16 float32 M=4, batch 2" in said
    assert "their kernel" in said
    assert "not run: other kernel: not installed" in said
    written = json.loads(output.read_text())
    assert written["commit"] == "abc"
    assert all("two_launch" in result["ms"] for result in written["results"])
    assert [result["batch"] for result in written["results"]] == [2, 3]
    moved, first = traffic.cycle(SMALL), written["results"][0]
    cycle_s = (moved.read_bytes - moved.write_bytes) / 4e12 + 2 * moved.write_bytes / 3.6e12
    roof_ms = 2 * cycle_s / SMALL.merge_interval * 1e3
    assert first["roofline_share"] == pytest.approx(roof_ms / first["ms"]["cycle"], rel=1e-9)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("option", "sweep", "expected"),
    [("--sweep-m", "merge interval", 9), ("--sweep-state", "state", 6), ("--sweep-batch", "batch", 6)],
)
def test_sweeps_write_a_table_json_and_curves(option, sweep, expected, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    for name, value in (
        ("LAYERS", LAYERS),
        ("BATCH", 3),
        ("MERGE_INTERVALS", (1, 2, 4)),
        ("HEAD_DIMS", (16, 32)),
        ("HEADS", (2,)),
        ("BATCHES", (1, 4)),
    ):
        monkeypatch.setattr(sweeps, name, value)
    output = tmp_path / "sweep.json"
    status, said = bench("kernels", option, "--output", str(output))
    assert status == 0, said
    written = json.loads(output.read_text())
    assert written["sweep"] == sweep
    assert len(written["results"]) == expected
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "sweep.png").unlink()
    assert bench("plot", str(output))[0] == 0
    assert (tmp_path / "sweep.png").exists()
    if option == "--sweep-m":
        assert set(written["merge_interval"]) == {"gdn", "kda", "rwkv6"}
        assert "recommended" in said


def test_the_recommended_interval_stands_beside_the_measured_one():
    cases = [Case(replace(LAYERS[1], merge_interval=m), 1) for m in sweeps.MERGE_INTERVALS]
    pairs = [(case, {"ms": {"cycle": abs(case.layout.merge_interval - 4)}}) for case in cases]
    expected = {"recommended": traffic.best_merge_interval(LAYERS[1]), "measured_best": 4}
    assert sweeps.choices(pairs) == {"kda": expected}


@pytest.mark.usefixtures("no_gpu")
def test_without_matplotlib_the_numbers_are_written_and_the_plot_is_not(monkeypatch, tmp_path):
    monkeypatch.setattr(sweeps, "LAYERS", LAYERS[:1])
    monkeypatch.setattr(sweeps, "MERGE_INTERVALS", (1, 2))
    monkeypatch.setattr(sweeps, "BATCH", 2)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    output = tmp_path / "x.json"
    status, said = bench("kernels", "--sweep-m", "--output", str(output))
    assert status == 1
    assert "pip install -e '.[bench]'" in said
    assert len(json.loads(output.read_text())["results"]) == 2


def test_only_a_sweep_of_this_version_is_drawn(tmp_path):
    file = tmp_path / "x.json"
    for content in ("{}", '{"sweep": "batch", "results": [{"case": "another"}]}'):
        file.write_text(content)
        status, said = bench("plot", str(file))
        assert (status, "run the sweep again" in said) == (1, True)


def test_options_that_need_a_gpu_say_so():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    status, said = bench("kernels", "--sweep-m")
    assert (status, "expected a CUDA GPU, found none" in said) == (1, True)


def test_one_sweep_a_run():
    status, said = bench("kernels", "--sweep-m", "--counters")
    assert (status, "got several" in said) == (2, True)


# As ncu 2025.3 prints ranges: its own lines first, then a row for each range and metric.
HEADER = '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size",'
HEADER += '"Grid Size","Device","CC","Section Name","Metric Name","Metric Unit","Metric Value"\n'


def recorded(*ranges: tuple[float, float], unit: str = "byte") -> str:
    lines = [
        '==PROF== Connected to process 41 (/usr/bin/python3.12)\n==PROF== Profiling "range": 1 pass\n',
        HEADER,
    ]
    for number, counted in enumerate(ranges):
        for direction, value in zip(("read", "write"), counted, strict=True):
            lines.append(
                f'"{number}","41","python3.12","127.0.0.1","range","1","7","","","0","9.0",'
                f'"Command line profiler metrics","dram__bytes_{direction}.sum","{unit}","{value:,.0f}"\n'
            )
    return "".join(lines)


def test_counters_are_read_from_the_csv_of_ncu():
    assert counters.parse(recorded((1234567, 89), (5, 0))) == [
        {"read_bytes": 1234567.0, "write_bytes": 89.0},
        {"read_bytes": 5.0, "write_bytes": 0.0},
    ]
    with pytest.raises(BenchError, match="expected a CSV table from ncu, got:\n==PROF=="):
        counters.parse("==PROF== Connected\n")
    with pytest.raises(BenchError, match="ncu gave '1' 'Mbyte'"):
        counters.parse(recorded((1, 1), unit="Mbyte"))
    with pytest.raises(BenchError, match="ncu gave 'n/a'"):
        counters.parse(recorded((1, 1)).replace('"1"\n', '"n/a"\n'))
    with pytest.raises(BenchError, match="left one out"):
        counters.parse(recorded((1, 1)).replace("dram__bytes_read.sum", "sm__cycles"))


def fake_ncu(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """An ncu on the PATH that runs ``script``; $log is the file that it should write."""
    program = folder / "ncu"
    program.write_text(f'#!/bin/sh\nwhile [ "$1" != --log-file ]; do shift; done\nlog="$2"\n{script}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def counts(factor: float) -> str:
    """Ranges of a GPU that moves what traffic.py says, but for its writes at M > 1."""
    ranges = []
    for layout in (SMALL, replace(SMALL, merge_interval=1)):
        moved = traffic.cycle(layout) * (counters.steps_of(layout) // layout.merge_interval) * 3
        written = moved.write_bytes * (factor if layout is SMALL else 1)
        ranges.append((moved.read_bytes, written))
    return recorded(*ranges)


@pytest.mark.usefixtures("no_gpu")
def test_counted_bytes_are_compared_with_traffic(monkeypatch, tmp_path):
    monkeypatch.setattr(counters, "cases", lambda: [Case(SMALL, 3)])
    (tmp_path / "near.csv").write_text(counts(1.06))
    (tmp_path / "far.csv").write_text(counts(1.15))
    fake_ncu(tmp_path, monkeypatch, f"cat {tmp_path}/near.csv > $log")
    output = tmp_path / "counted.json"
    status, said = bench("kernels", "--counters", "--output", str(output))
    assert status == 0, said
    (result,) = json.loads(output.read_text())["counters"]
    assert result["off"]["write_bytes"] == pytest.approx(0.06, abs=1e-3)
    assert result["off"]["read_bytes"] == pytest.approx(0, abs=1e-3)
    cycle, through = traffic.cycle(SMALL), traffic.write_through(SMALL)
    fewer = through.write_bytes * SMALL.merge_interval / (1.06 * cycle.write_bytes)
    assert result["write_reduction"] == pytest.approx(fewer, rel=1e-3)
    fake_ncu(tmp_path, monkeypatch, f"cat {tmp_path}/far.csv > $log")
    status, said = bench("kernels", "--counters")
    assert status == 1
    assert "it is off for gdn 1/2x16 float32 M=4" in said


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            "echo '==ERROR== ERR_NVGPUCTRPERM - no permission' > $log; exit 1",
            "got ERR_NVGPUCTRPERM; run this",
        ),
        ("echo broken >&2; exit 3", "ncu ended with status 3"),
        ("echo > $log", "expected a CSV table"),
    ],
)
def test_what_keeps_ncu_from_counting_is_said(script, message, monkeypatch, tmp_path):
    monkeypatch.setattr(counters, "cases", lambda: [Case(SMALL, 3)])
    fake_ncu(tmp_path, monkeypatch, script)
    status, said = bench("kernels", "--counters")
    assert status == 1
    assert message in said


@pytest.mark.usefixtures("no_gpu")
def test_without_ncu_the_counters_say_what_to_install(monkeypatch):
    monkeypatch.setenv("PATH", "")
    status, said = bench("kernels", "--counters")
    assert (status, "install the CUDA toolkit" in said.replace("\n", " ")) == (1, True)


@pytest.mark.usefixtures("no_gpu")
def test_the_watched_program_marks_two_ranges_a_case(monkeypatch):
    called = []
    monkeypatch.setattr(counters, "cases", lambda: [Case(SMALL, 3), Case(LAYERS[1], 3)])
    monkeypatch.setattr(counters, "DEVICE", "cpu")
    for name in ("start", "stop"):
        monkeypatch.setattr(torch.cuda.profiler, name, lambda name=name: called.append(name))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    counters.main()
    assert called == ["start", "stop"] * 4


def test_predictions_scale_the_data_sheet_by_the_measured_share(tmp_path):
    case = report.cases()[0]
    result = {"case": case.name, "batch": case.batch, "roofline_share": 0.5}
    unknown = {"case": "another", "batch": 1, "roofline_share": 0.5}
    (row,) = predict.rtx_4090({"results": [result, unknown]})
    expected = 2e3 * case.batch * traffic.mean_step_bytes(case.layout) / 1008e9
    assert row["predicted_ms"] == pytest.approx(expected, rel=1e-12)
    file = tmp_path / "measured.json"
    file.write_text(json.dumps({"machine": "NVIDIA H200", "commit": "abc", "results": [result]}))
    status, said = bench("predict", str(file))
    assert status == 0
    assert "PREDICTED from NVIDIA H200 at commit abc: not measured" in said
    file.write_text("{}")
    status, said = bench("predict", str(file))
    assert (status, "run the bench again" in said.replace("\n", " ")) == (1, True)
