"""Programs of others that ask the service, each in an environment of its own: libraries clash."""

import os
import subprocess
import sys
from pathlib import Path

from running_service import ROOT

SCHEMATHESIS, AIPERF = "schemathesis==4.32.5", "aiperf==0.13.0"


def installed(requirement: str) -> Path:
    """The folder with the commands of `requirement`; installed once, in minutes."""
    folder = ROOT / ".cache" / "tools" / requirement
    done = folder / "done"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([folder / "bin" / "pip", "install", "--quiet", requirement], check=True)
        done.touch()
    return folder / "bin"


def run(command: list[object], folder: Path, timeout_s: float, **environment: str) -> str:
    """What a command in `folder` prints. Fails with that when the command does."""
    ended = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )
    assert ended.returncode == 0, f"{command[0]} ended with {ended.returncode}:\n{ended.stdout[-20_000:]}"
    return ended.stdout
