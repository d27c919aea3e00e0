"""What tests of programs that run beside them need."""

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any


def until(condition: Callable[[], Any], timeout_s: float, what: str, period_s: float = 0.2) -> Any:
    """Poll until `condition` is truthy and return its value; fail after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {timeout_s} s in vain for {what}"
        time.sleep(period_s)
    return value


def free_ports(number: int) -> list[int]:
    """Ports that nothing listens on, outside the ranges from which Ray and the kernel take theirs."""
    free: list[int] = []
    for port in random.sample(range(20_000, 32_000), 100):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            free.append(port)
    if len(free) < number:
        raise OSError(
            f"expected {number} free ports from 20000 to 32000; got {len(free)}; end what holds them"
        )
    return free[:number]


@contextmanager
def repeated(action: Callable[[], object], period_s: float) -> Iterator[None]:
    """`action`, again and again, beside what is done meanwhile."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(period_s):
            action()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
