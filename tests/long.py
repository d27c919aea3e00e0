"""The long tests, and the seeded faults that a test must catch: `make test-long`.

Writes tests/LONG.md, to be committed, and exits 1 when a long test fails or a fault survives.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

from faults import FAULTS, TRITON, Fault
from rich.progress import track

ROOT = Path(__file__).resolve().parents[1]
REPORT = ROOT / "tests" / "LONG.md"


def pytest(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run pytest; the Triton tests interpreted, alone, because the switch holds for a whole process."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    environment = os.environ | ({"TRITON_INTERPRET": "1"} if TRITON in " ".join(arguments) else {})
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


def copy_with(fault: Fault, directory: Path) -> None:
    """The project in ``directory``, with the fault in it."""
    ignored = shutil.ignore_patterns(
        ".git",
        ".venv",
        "tools",
        "node_modules",
        "grafana-venv",
        ".mypy_cache",
        ".pytest_cache",
        "__pycache__",
    )
    shutil.copytree(ROOT, directory, ignore=ignored, dirs_exist_ok=True)
    source = directory / fault.file
    text = source.read_text()
    if text.count(fault.right) != 1:
        raise SystemExit(
            f"{fault.name}: expected one {fault.right!r} in {fault.file}, got {text.count(fault.right)}; "
            "the code has changed, so write the fault anew"
        )
    source.write_text(text.replace(fault.right, fault.wrong))


def caught_by(fault: Fault) -> str | None:
    """The first test that fails with the fault in, or None when it survives."""
    with tempfile.TemporaryDirectory() as scratch:
        copy_with(fault, Path(scratch))
        done = pytest("-x", "-q", fault.tests, cwd=Path(scratch))
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if done.returncode not in (0, 1) or (done.returncode == 1) != bool(failed):
        raise SystemExit(f"{fault.name}: pytest ended with {done.returncode}\n{done.stdout[-3000:]}")
    return failed[1] if failed else None


def results(report: Path) -> list[str]:
    """A row for each test in pytest's XML: its name, what it recorded, seconds."""
    rows = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        # A failure, an error and a skipped test have an element of their own.
        bad = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        said = [
            f"**{bad[0]}**" if bad else "passed",
            *(found.get("value", "") for found in case.iter("property")),
        ]
        rows.append(f"| {case.get('name')} | {'; '.join(said)} | {float(case.get('time', 0)):.0f} |")
    return rows


def main() -> None:
    start = time.monotonic()
    print("long tests ...", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        fuzz = pytest("-q", "-m", "long and not gpu", f"--junitxml={report}", "tests")
        print(fuzz.stdout, flush=True)
        measured = results(report)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        caught = track(pool.map(caught_by, FAULTS), description="seeded faults", total=len(FAULTS))
        catches = dict(zip((fault.name for fault in FAULTS), caught, strict=True))
    survivors = [name for name, test in catches.items() if test is None]
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    rows = [f"| {name} | {f'`{test}`' if test else '**survives**'} |" for name, test in catches.items()]
    REPORT.write_text(
        "# Last run of `make test-long`\n\n"
        f"{date.today()}, commit {commit}, Python {platform.python_version()}, "
        f"{time.monotonic() - start:.0f} s.\n\n"
        f"Long tests: {fuzz.stdout.strip().splitlines()[-1]}\n\n"
        "| test | result | s |\n|---|---|---|\n" + "\n".join(measured) + "\n\n"
        f"Seeded faults (tests/faults.py): {len(FAULTS) - len(survivors)} of {len(FAULTS)} caught.\n\n"
        "| fault | caught by |\n|---|---|\n" + "\n".join(rows) + "\n"
    )
    print(REPORT.read_text())
    if fuzz.returncode or survivors:
        raise SystemExit("make test-long failed: see above")


if __name__ == "__main__":
    main()
