"""The page that draws the boards: built, served and photographed."""

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from PIL import Image

from dashboards.processes import ObserveError, child, free_port, needed, wait_answers

SOURCE = Path(__file__).parent / "page"
BUILD = Path(__file__).parents[1] / ".cache" / "page"
WIDTH = 1440
GRID_CELL = 38
"""Pixels of a row of Grafana's grid, the gap included."""
HEADER = 80
VIRTUAL_TIME_MS = 15_000
"""What the page may take of its own time, in which timers pass at once and answers are waited for."""
CHROMIUM_TIMEOUT_S = 90
CHROMIUM = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)


def build_page() -> Path:
    """The built page, made anew if its sources have changed. Returns the folder to serve it from."""
    sources = sorted(path for path in SOURCE.rglob("*") if path.is_file())
    state = hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()
    stamp = BUILD / "built.sha256"
    if stamp.exists() and stamp.read_text() == state:
        return BUILD
    npm = needed("npm", "npm")
    stamp.unlink(missing_ok=True)
    lock = BUILD / "package-lock.json"
    installed = lock.exists() and lock.read_bytes() == (SOURCE / lock.name).read_bytes()
    shutil.rmtree(BUILD / "src", ignore_errors=True)
    shutil.copytree(SOURCE, BUILD, dirs_exist_ok=True)
    if not (installed and (BUILD / "node_modules" / ".package-lock.json").exists()):
        # Grafana's packages name a React that some of theirs do not take yet, and need no scripts.
        _npm(npm, "ci", "--legacy-peer-deps", "--ignore-scripts", "--no-audit", "--no-fund")
    _npm(npm, "run", "build")
    stamp.write_text(state)
    return BUILD


def _npm(npm: str, *arguments: str) -> None:
    done = subprocess.run([npm, *arguments], cwd=BUILD, capture_output=True, text=True)
    if done.returncode:
        raise ObserveError(
            f"expected `npm {' '.join(arguments)}` to work in {BUILD}; it ended with {done.returncode}:\n"
            f"{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )


@contextmanager
def serving_page(boards: Path, prometheus_url: str, port: int | None = None) -> Iterator[str]:
    """The page with the boards in the folder `boards` on the data of `prometheus_url`. Yields its URL."""
    folder = build_page()
    port = port or free_port()
    vite = [needed("node", "nodejs"), "node_modules/vite/bin/vite.js", "preview", "--port", str(port)]
    settings = {"PROMETHEUS_URL": prometheus_url, "BOARDS_FOLDER": str(boards.resolve())}
    with child(vite, BUILD / "preview.log", cwd=folder, env=os.environ | settings) as process:
        url = f"http://127.0.0.1:{port}"
        wait_answers(process, f"{url}/boards/index.json", BUILD / "preview.log", 30)
        yield url


def load_boards(folder: Path) -> list[Mapping[str, object]]:
    """The boards in a folder, in the order of their titles."""
    found = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return sorted((board for board in found if "panels" in board), key=lambda board: str(board["title"]))


def board_height(board: Mapping[str, object]) -> int:
    """Pixels that the whole board takes."""
    panels = board["panels"]
    assert isinstance(panels, list)
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    return HEADER + GRID_CELL * int(rows)


def photograph(url: str, height: int, image: Path, scratch: Path) -> tuple[str, list[str]]:
    """Open `url` in Chromium and write what it shows to `image`.

    Returns the page's final HTML, and what the page wrote to the console.
    """
    profile = scratch / "chromium"
    shutil.rmtree(profile, ignore_errors=True)
    command = [
        needed("chromium", "chromium"),
        *CHROMIUM,
        f"--user-data-dir={profile}",
        f"--window-size={WIDTH},{height}",
        f"--virtual-time-budget={VIRTUAL_TIME_MS}",
        "--enable-logging=stderr",
        f"--screenshot={image}",
        "--dump-dom",
        url,
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CHROMIUM_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise ObserveError(
            f"expected Chromium to show {url} within {CHROMIUM_TIMEOUT_S} s; it did not"
        ) from None
    if done.returncode or not image.exists():
        raise ObserveError(
            f"expected Chromium to show {url}; it ended with {done.returncode}: {done.stderr[-2000:]}"
        )
    # A board has few colours: a palette of them is a third of the bytes, and what is committed stays small.
    with Image.open(image) as full:
        few = full.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(image, optimize=True)
    return done.stdout, [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
