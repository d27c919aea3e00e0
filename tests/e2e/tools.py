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


HOOKS = """import schemathesis


@schemathesis.hook
def map_body(_, body):
    if isinstance(body, dict) and isinstance(body.get("model"), str):
        body["model"] = "demo"
    return body
"""
"""For schemathesis: any name would do in the schema, and one that is unknown is answered with 404."""


def run(command: list[object], folder: Path, timeout_s: float, **environment: str) -> str:
    """What a command in `folder` prints. Fails with that when the command does."""
    # AIPerf takes a folder with a tokenizer for a name on a hub when it is told to work without one.
    inherited = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    ended = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env=inherited | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )
    assert ended.returncode == 0, f"{command[0]} ended with {ended.returncode}:\n{ended.stdout[-20_000:]}"
    return ended.stdout
