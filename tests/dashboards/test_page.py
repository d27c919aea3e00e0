"""The built page on a real Prometheus, in Chromium: what is drawn, what is empty, what is broken."""

import json
import re
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import sample
from pages import Page

from dashboards import show
from dashboards.observe import running_prometheus
from dashboards.processes import ObserveError, free_port, needed

pytestmark = [
    # Needs node, npm and Chromium; the first build installs Grafana's packages.
    pytest.mark.long,
    pytest.mark.timeout(600),
]


@dataclass
class Shown:
    page: Page
    console: list[str]
    image: Path


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    """The sample board in Chromium, once Prometheus has samples enough for its rates."""
    folder = tmp_path_factory.mktemp("page")
    boards = folder / "boards"
    boards.mkdir()
    for board in (sample.board(), sample.sister()):
        (boards / f"{board['uid']}.json").write_text(json.dumps(board))
    show.build_page()
    port = free_port()
    job = {"job_name": "sample", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
    configuration = {"global": {"scrape_interval": "1s"}, "scrape_configs": [job]}
    with (
        sample.exporter(port),
        running_prometheus(folder, configuration) as prometheus,
        show.serving_page(boards, prometheus) as url,
    ):
        deadline_s = time.monotonic() + 30
        while not _samples(prometheus) >= 6:
            assert time.monotonic() < deadline_s, "waited 30 s in vain for six scrapes"
            time.sleep(0.2)
        image = folder / "sample.png"
        html, console = show.photograph(
            f"{url}/?board=sample", show.board_height(sample.board()), image, folder
        )
    return Shown(Page(html), console, image)


def _samples(prometheus: str) -> float:
    query = {"query": 'max(count_over_time(up{job="sample"}[1m]))'}
    result = httpx.get(f"{prometheus}/api/v1/query", params=query).json()["data"]["result"]
    return float(result[0]["value"][1]) if result else 0


@pytest.mark.parametrize(
    ("title", "series", "unit"),
    [
        # The override by name gives pool two another unit.
        ("Lines", 2, r"^0\.0\d+ ms$"),
        ("Figure", 2, r"^[12]\d(\.\d+)? MB/s$"),
        ("Bars", 2, r"^8 rows$"),
        ("Table", 4, r"^16 rows$"),
        ("Heat", 6, r"^\d+ ms$|^\+Inf$"),
        ("Words", 0, r"^$"),
    ],
)
def test_panel_is_drawn(shown: Shown, title: str, series: int, unit: str) -> None:
    panel = shown.page.panels[title]
    assert panel["data-state"] == "drawn", panel
    assert int(panel["data-series"]) == series
    assert re.search(unit, panel["data-unit"]), panel["data-unit"]
    assert title in panel["text"]
    assert "No data" not in panel["text"]
    assert panel["data-ink"] == "true", "nothing of the panel's colours is on its canvas"


def test_values_and_legends_are_read(shown: Shown) -> None:
    text = {title: panel["text"] for title, panel in shown.page.panels.items()}
    assert all(
        pool in text[title] for pool in ("one", "two") for title in ("Lines", "Figure", "Bars", "Table")
    )
    assert "8 rows" in text["Table"]
    assert "16 rows" in text["Table"]
    assert "What to do" in text["Words"]
    assert "A row" in shown.page.text


def test_query_without_data_is_empty(shown: Shown) -> None:
    panel = shown.page.panels["Nothing"]
    assert panel["data-state"] == "empty"
    assert panel["data-ink"] == "false"
    assert "No data" in panel["text"]


@pytest.mark.parametrize(("title", "message"), [("Broken", "parse error"), ("Unknown", "got piechart")])
def test_what_cannot_be_drawn_is_an_error(shown: Shown, title: str, message: str) -> None:
    panel = shown.page.panels[title]
    assert panel["data-state"] == "error"
    assert message in panel["text"]


def test_boards_are_linked(shown: Shown) -> None:
    assert any("board=sister" in link for link in shown.page.links)


def test_console_has_no_error(shown: Shown) -> None:
    assert shown.console == []


def test_screenshot_is_small(shown: Shown) -> None:
    assert 5_000 < shown.image.stat().st_size < 200_000


def test_missing_program_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ObserveError, match="install the package nodejs"):
        needed("node", "nodejs")
