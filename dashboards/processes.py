"""Programs that run beside us while boards are observed: found, started, awaited, ended."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from deploy.setup_tools import found

STOP_TIMEOUT_S = 60


class ObserveError(Exception):
    """The boards could not be shown. The message says what was expected and what came."""


def needed(program: str, package: str) -> str:
    """The path of a program, or an error that says which package has it."""
    path = found(program)
    if path is None:
        raise ObserveError(
            f"expected the program {program} on the PATH; it is not there; install the package {package} "
            f"(on Debian: apt-get install {package})"
        )
    return path


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def is_free(port: int) -> bool:
    """Whether nothing listens on it."""
    try:
        with socket.create_server(("127.0.0.1", port)):
            return True
    except OSError:
        return False


@contextmanager
def child(
    command: Sequence[str], log: Path, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> Iterator["subprocess.Popen[bytes]"]:
    """A program that runs for as long as the block does; what it says goes to `log`."""
    with log.open("wb") as output:
        # In a session of its own: Ctrl-C reaches us alone, and we end it in order.
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, cwd=cwd, env=env, start_new_session=True
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            # With what it started.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_answers(process: "subprocess.Popen[bytes]", url: str, log: Path, timeout_s: float) -> None:
    """Wait until `url` answers with success."""
    deadline_s = time.monotonic() + timeout_s
    came = f"nothing within {timeout_s:.0f} s"
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            came = f"the end of its program with code {process.returncode}"
            break
        try:
            if httpx.get(url, timeout=10).is_success:
                return
        except httpx.TransportError:
            pass  # Nothing listens yet.
        time.sleep(0.2)
    raise ObserveError(f"expected {url} to answer; got {came}; it said:\n{log.read_text()[-2000:]}")
