"""What is generated is up to date, and Grafana's published schemas have nothing against it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dashboards.__main__ import app
from dashboards.boards import boards
from dashboards.generate import GENERATED, files, stale, write
from service.metrics import SPECS

ROOT = Path(__file__).parents[2]
VALIDATE = ROOT.parent / "shared" / "data" / "grafana" / "validate.py"


def test_generated_files_are_fresh() -> None:
    assert stale() == [], "run python -m dashboards build"


def test_boards_are_the_same_in_every_run() -> None:
    other = "import json; from dashboards.boards import boards; print(json.dumps(boards()))"
    printed = subprocess.run([sys.executable, "-c", other], cwd=ROOT, check=True, capture_output=True).stdout
    assert json.dumps(boards()) == printed.decode().strip()


def test_build_writes_what_is_stale_and_nothing_else(tmp_path: Path) -> None:
    assert sorted(write(tmp_path)) == sorted(files())
    assert write(tmp_path) == []
    changed, old = tmp_path / "docs" / "metrics.md", tmp_path / GENERATED / "old.json"
    changed.write_text("by hand")
    old.write_text("{}")
    assert stale(tmp_path) == [GENERATED / "old.json", Path("docs/metrics.md")]
    write(tmp_path)
    assert not old.exists()
    assert changed.read_text() == files()[Path("docs/metrics.md")]


def test_check_names_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CliRunner().invoke(app, ["check"]).exit_code == 0
    broken = boards()
    broken["deltalog-slo"]["panels"][0]["title"] = ""
    monkeypatch.setattr("dashboards.generate.boards", lambda: broken)
    monkeypatch.setattr("dashboards.boards.boards", lambda: broken)
    result = CliRunner().invoke(app, ["check"])
    assert result.exit_code == 1
    assert "deltalog-slo.json is stale" in result.output
    assert "has no title" in result.output


def test_the_page_of_metrics_has_each_once() -> None:
    page = files()[Path("docs/metrics.md")]
    for spec in SPECS:
        (line,) = [line for line in page.splitlines() if line.startswith(f"| `{spec.prom_name}` ")]
        assert spec.help in line
        assert all(f"`{label}`" in line for label in spec.labels)


def _findings(board: dict[str, Any], folder: Path) -> tuple[int, str]:
    if not VALIDATE.is_file():
        pytest.skip("no ../shared/data/grafana beside the repository, so no published schemas")
    path = folder / "board.json"
    path.write_text(json.dumps(board))
    done = subprocess.run([sys.executable, VALIDATE, path], capture_output=True, text=True)
    assert "findings" in done.stdout, done.stderr
    return done.returncode, done.stdout


@pytest.mark.parametrize("uid", boards())
def test_grafanas_schemas_have_no_finding(uid: str, tmp_path: Path) -> None:
    assert _findings(json.loads((ROOT / GENERATED / f"{uid}.json").read_text()), tmp_path)[0] == 0


@pytest.mark.parametrize(
    "fault",
    [
        {"unit": "secondz"},
        {"target": {"exprr": "up"}},
        {"options": {"colourMode": "value"}},
    ],
    ids=["unit", "query", "option"],
)
def test_grafanas_schemas_find_a_fault(fault: dict[str, Any], tmp_path: Path) -> None:
    board = boards()["deltalog-slo"]
    panel = board["panels"][0]
    panel["fieldConfig"]["defaults"].update({key: value for key, value in fault.items() if key == "unit"})
    panel["targets"][0].update(fault.get("target", {}))
    panel["options"].update(fault.get("options", {}))
    code, found = _findings(board, tmp_path)
    assert code == 1
    assert "SLO met" in found
