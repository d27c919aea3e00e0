"""A process between whoever sends signals and the service.

A terminal, `timeout`, systemd and `kill -- -GROUP` signal every process of a group at once. Ray's own, in the
same group, would end before the service has drained. So the service gets a session of its own, and this
process, which stays in the group, passes each signal on.
"""

import ctypes
import os
import signal
import subprocess
from contextlib import suppress

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def run(command: list[str]) -> int:
    """Run ``command`` until it ends, whatever signals come. Returns its exit code as a shell would."""
    early: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, _: object) -> None:
        if process is None:
            early.append(number)
            return
        # A terminal that went away asks for an end; a person who asks for a new configuration has one still.
        ending = number == signal.SIGHUP and had_terminal and not _has_terminal()
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM if ending else number)

    had_terminal = _has_terminal()
    for passed in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(passed, pass_on)
    parent = os.getpid()
    process = subprocess.Popen(command, start_new_session=True, preexec_fn=lambda: _end_with(parent))
    for number in early:
        pass_on(number, None)
    code = process.wait()
    return code if code >= 0 else 128 - code


def _end_with(parent: int) -> None:
    """In the child: drain when the parent is killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it was killed before that
        os.kill(os.getpid(), signal.SIGTERM)


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY))
    except OSError:
        return False
    return True
