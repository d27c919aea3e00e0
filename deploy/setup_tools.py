"""Put Prometheus and Alertmanager into .cache/tools where the machine has none; tests of the rules run them.

Their Debian packages are downloaded and unpacked, not installed, so that nobody needs to be root. Standard
library only. A second run does nothing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
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
    # Moved to its place when all is done, so that nothing that was interrupted is found there.
    TOOLS.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=TOOLS.parent) as folder:
        _unpack(Path(folder))
        shutil.rmtree(TOOLS, ignore_errors=True)
        os.rename(Path(folder) / "root", TOOLS)


def _unpack(folder: Path) -> None:
    """The packages' files, into the folder "root" of this one."""
    root, lists, archives = (folder / name for name in ("root", "lists", "archives"))
    for each in (root, lists / "partial", archives / "partial"):
        each.mkdir(parents=True)
    apt = [
        "apt-get",
        "-qq",
        "-oAPT::Sandbox::User=root",
        f"-oDir::State::Lists={lists}",
        f"-oDir::Cache::Archives={archives}",
    ]
    run([*apt, "update"], folder)
    run([*apt, "download", *PACKAGES], folder)
    for package in folder.glob("*.deb"):
        run(["dpkg", "-x", str(package), str(root)], folder)
    _relocate(
        root / BIN.relative_to(TOOLS) / "prometheus-alertmanager", b"/usr/share/prometheus/alertmanager"
    )


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


def run(command: list[str], folder: Path) -> None:
    """Run it there, or exit."""
    if subprocess.run(command, cwd=folder).returncode != 0:
        sys.exit(
            f"{' '.join(command[:1])} failed; install {' and '.join(PACKAGES)} yourself, then run this again"
        )


if __name__ == "__main__":
    main()
