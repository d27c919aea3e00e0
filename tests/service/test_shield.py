"""Signals that reach a whole process group reach the service once, and only through its shield."""

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

CHILD = """
import os, pathlib, signal, sys, time
log = pathlib.Path(sys.argv[1])
def note(number, _):
    with log.open("a") as file:
        file.write(signal.Signals(number).name + "\\n")
    if number == signal.SIGTERM:
        sys.exit(3)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, note)
log.write_text("up\\n")
while True:
    time.sleep(0.05)
"""
SHIELD = "import sys; from service import shield; sys.exit(shield.run([sys.executable, '-c', *sys.argv[1:]]))"


def command(log: Path) -> list[str]:
    return [sys.executable, "-c", SHIELD, CHILD, str(log)]


def comes(log: Path, *expected: str) -> None:
    deadline = time.monotonic() + 20
    while not log.exists() or log.read_text().split() != list(expected):
        assert time.monotonic() < deadline, log.exists() and log.read_text()
        time.sleep(0.02)


@pytest.mark.parametrize("send", [os.kill, os.killpg])
def test_a_signal_comes_once_and_the_exit_code_comes_back(
    tmp_path: Path, send: Callable[[int, int], None]
) -> None:
    log = tmp_path / "log"
    process = subprocess.Popen(command(log), start_new_session=True)
    comes(log, "up")
    seen = ["up"]
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        send(process.pid, number)
        seen.append(number.name)
        comes(log, *seen)
    assert process.wait(10) == 3


def test_a_terminal_that_closes_ends_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    pid, terminal = pty.fork()
    if not pid:
        os.execv(sys.executable, command(log))
    comes(log, "up")
    os.kill(pid, signal.SIGHUP)  # of somebody who asks for a new configuration
    comes(log, "up", "SIGHUP")
    os.close(terminal)
    comes(log, "up", "SIGHUP", "SIGTERM")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3


def test_a_shield_that_is_killed_ends_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = subprocess.Popen(command(log), start_new_session=True)
    comes(log, "up")
    process.kill()
    process.wait(10)
    comes(log, "up", "SIGTERM")


def test_what_ends_by_a_signal_has_a_shells_exit_code() -> None:
    script = "import os; os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", SHIELD, script]).returncode == 128 + 9
