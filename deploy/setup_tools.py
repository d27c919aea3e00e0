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
    _relocate(BIN / "prometheus-alertmanager", b"/usr/share/prometheus/alertmanager")


def _relocate(program: Path, folder: bytes) -> None:
    """Debian's Alertmanager does not start without its templates, at a path that nothing but its code says.
    Let it look under the folder that it is started in, TOOLS, by a path of the same length."""
    code = program.read_bytes()
    if folder not in code:
        sys.exit(f"expected {folder.decode()} in {program}; it is not; install {PACKAGES[1]} yourself")
    program.write_bytes(code.replace(folder, folder[1:].replace(b"/", b"//", 1)))


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
