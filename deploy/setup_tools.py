"""Put Prometheus and Alertmanager into .cache/tools where the machine has none; tests of the rules run them.

Their Debian packages are downloaded and unpacked, not installed, so that nobody needs to be root. Standard
library only. A second run does nothing.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

TOOLS = Path(__file__).resolve().parent.parent / ".cache" / "tools"
BIN = TOOLS / "usr" / "bin"
PACKAGES = ["prometheus", "prometheus-alertmanager"]
PROGRAMS = ["prometheus", "promtool", "prometheus-alertmanager"]


def main() -> None:
    """Exit with status 1 and a remedy when this machine cannot get them."""
    if all(found(program) for program in PROGRAMS):
        return
    if not (shutil.which("apt-get") and shutil.which("dpkg")):
        sys.exit(
            f"expected {', '.join(PROGRAMS)} on the path, or Debian's apt-get; got neither; install them"
        )
    lists, archives = TOOLS / "lists" / "partial", TOOLS / "archives" / "partial"
    for folder in (lists, archives):
        folder.mkdir(parents=True, exist_ok=True)
    apt = [
        "apt-get",
        "-qq",
        f"-oDir::State::Lists={lists.parent}",
        f"-oDir::Cache::Archives={archives.parent}",
    ]
    run([*apt, "update"])
    run([*apt, "download", *PACKAGES])
    for package in TOOLS.glob("*.deb"):
        run(["dpkg", "-x", str(package), str(TOOLS)])


def found(program: str) -> str | None:
    """Its path: the machine's own, or the one that this script unpacked."""
    return shutil.which(program) or shutil.which(program, path=str(BIN))


def run(command: list[str]) -> None:
    """Run it in TOOLS, or exit."""
    if subprocess.run(command, cwd=TOOLS).returncode != 0:
        sys.exit(
            f"{' '.join(command[:1])} failed; install {' and '.join(PACKAGES)} yourself, then run this again"
        )


if __name__ == "__main__":
    main()
