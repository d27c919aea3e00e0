"""Bodies that are made to hurt: refused early, and the ingress does not grow with them."""

import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from running_service import RunningService

from service.api.http import MAX_BODY_BYTES

CLIENTS = 8
ENDLESS = 10**6
UNDERWAY_BYTES = 32 * 2**20
"""What the sockets and HAProxy may hold of a body that nobody reads any more."""
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: test\r\ntransfer-encoding: chunked\r\n\r\n"


def upload(port: int, chunk: bytes, number: int) -> tuple[int, int]:
    """POST `chunk` until an answer comes, `number` times at most. Returns the status and the bytes sent."""
    framed, sent = b"%x\r\n%b\r\n" % (len(chunk), chunk), 0
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(HEAD)
        client.setblocking(False)
        while sent < number * len(chunk) and not answered(client):
            sent += len(chunk) if send(client, framed) else 0
        client.settimeout(60)
        client.sendall(b"0\r\n\r\n")
        return int(client.recv(64).split(b" ", 2)[1]), sent


def send(client: socket.socket, framed: bytes) -> bool:
    """Whether the chunk went out before an answer came."""
    while framed and not answered(client):
        try:
            framed = framed[client.send(framed) :]
        except BlockingIOError:
            time.sleep(0.001)
    return not framed


def answered(client: socket.socket) -> bool:
    try:
        return bool(client.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return False


def kilobytes(pid: int, what: str) -> int:
    found = re.search(rf"^{what}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1])


@pytest.mark.parametrize(
    ("chunk", "number", "refusal"),
    [
        (b" " * 2**16, ENDLESS, 413),
        (b"[" * 2**16, 255, 400),
        (b"\xff" * 2**16, 255, 400),
        (b'{"a":' * 10_000, 300, 400),
    ],
    ids=["endless", "brackets", "no text", "nested objects"],
)
def test_memory_stays_bounded(service: RunningService, chunk: bytes, number: int, refusal: int) -> None:
    """Eight at a time. Each may hold its body, and what it takes to look at it, and no more."""
    (ingress,) = service.processes("ServeReplica:deltalog:ingress")
    Path(f"/proc/{ingress}/clear_refs").write_text("5")  # The peak is counted from here on.
    before = kilobytes(ingress, "VmRSS")
    with ThreadPoolExecutor(CLIENTS) as clients:
        uploads = [clients.submit(upload, service.config["port"], chunk, number) for _ in range(CLIENTS)]
        answers = [one.result() for one in uploads]
    assert {status for status, _ in answers} == {refusal}
    assert max(sent for _, sent in answers) <= MAX_BODY_BYTES + UNDERWAY_BYTES
    assert kilobytes(ingress, "VmHWM") - before < CLIENTS * 2 * MAX_BODY_BYTES // 1024
    assert service.post("completions", {"prompt": "x", "max_tokens": 1}).status_code == 200
