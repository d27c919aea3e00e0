"""Documents name files, settings, metrics and make targets that exist, and figures that the code gives."""

import re
from pathlib import Path

import pytest

from deltalog_kernels import GDN, LogLayout, traffic
from service.config import PoolConfig, ServiceConfig
from service.metrics import SPECS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
DOCUMENTS = sorted(ROOT.glob("*.md"))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_linked_files_and_make_targets_exist(document: Path) -> None:
    text = document.read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)`", text)) <= targets
    for link in re.findall(r"\]\((?!http)([^)]+)\)", text):
        assert (ROOT / link).is_file(), link


def test_files_named_in_the_readme_exist() -> None:
    named = set(re.findall(r"\b([\w/-]+\.(?:py|yaml))\b", README))
    assert len(named) > 10
    files = [
        path.as_posix()
        for top in ("deltalog_kernels", "service", "dashboards", "deploy", "tests")
        for path in ROOT.glob(f"{top}/**/*")
    ]
    for name in named:
        assert any(file.endswith(f"/{name}") for file in files), name


@pytest.mark.parametrize("settings", [ServiceConfig, PoolConfig])
def test_every_setting_is_in_the_readme(settings: type[ServiceConfig | PoolConfig]) -> None:
    for name in settings.model_fields:
        assert f"`{name}`" in README, name


def test_metrics_named_in_the_readme_exist() -> None:
    named = set(re.findall(r"`(deltalog_[a-z_]+)[{`]", README)) - {"deltalog_kernels"}
    assert named <= {spec.name for spec in SPECS}


@pytest.mark.parametrize(
    ("row", "layout"),
    [
        ("Qwen3-Next 80B", LogLayout(GDN, 16, 32, 128, 128, merge_interval=8)),
        ("demo model", LogLayout(GDN, 4, 8, 64, 64, merge_interval=8)),
    ],
)
def test_traffic_table(row: str, layout: LogLayout) -> None:
    baseline = traffic.write_through(layout) * layout.merge_interval
    cycle = sum((traffic.step(layout, live) for live in range(layout.merge_interval)), traffic.Traffic())
    (line,) = [line for line in README.splitlines() if line.startswith(f"| {row}")]
    assert f"| {layout.log_bytes / layout.base_bytes:.0%} |".replace("%", " %") in line
    assert f"| {baseline.write_bytes / cycle.write_bytes:.1f} times less |" in line
    assert f"| {baseline.total_bytes / cycle.total_bytes:.2f} times less |" in line
