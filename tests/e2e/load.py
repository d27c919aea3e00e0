"""Many streams at once from one process, by a client that costs little: the service is what is measured."""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

EVENT = b"data: {"
DONE = b"data: [DONE]"
ERROR = b'data: {"error"'
KEPT = len(ERROR)


@dataclass
class Stream(asyncio.Protocol):
    """One request for a stream, and what came of it."""

    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)
    status: int = 0
    head: bytes = b""
    events: int = 0
    """Events with JSON, the error event included; with the simulated engine one a token."""
    done: bool = False
    error: dict[str, Any] | None = None
    sent_at_s: float = 0.0
    first_at_s: float = 0.0
    ended_at_s: float = 0.0
    complete: bool = False
    """Whether the body came to its end, as its framing says."""

    def __post_init__(self) -> None:
        self.ended = asyncio.get_running_loop().create_future()
        self._tail = b""
        self._text = b""

    @property
    def retry_after_s(self) -> int:
        return int(self.head.lower().partition(b"retry-after: ")[2].split(b"\r\n")[0] or 0)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        content = json.dumps(self.body).encode()
        lines = [
            "POST /v1/completions HTTP/1.1",
            "host: test",
            "content-type: application/json",
            "connection: close",
            f"content-length: {len(content)}",
            *(f"{name}: {value}" for name, value in self.headers.items()),
        ]
        self.sent_at_s = time.monotonic()
        transport.write("\r\n".join(lines).encode() + b"\r\n\r\n" + content)

    def data_received(self, data: bytes) -> None:
        if not self.status:
            self._text += data
            head, separator, data = self._text.partition(b"\r\n\r\n")
            if not separator:
                return
            self.head, self.status = head, int(head.split(b" ", 2)[1])
        if not data:
            return
        seen = self._tail + data
        # What may be the beginning of a mark is counted with what follows it.
        self.events += seen.count(EVENT) - self._tail.count(EVENT)
        self.done = self.done or DONE in seen
        if self.events and not self.first_at_s:
            self.first_at_s = time.monotonic()
        if ERROR in seen and self.error is None:
            line = seen[seen.index(ERROR) :].partition(b"\n")[0].strip()
            if line.endswith(b"}"):
                self.error = json.loads(line.removeprefix(b"data: "))["error"]
        self.complete = seen.endswith(b"0\r\n\r\n") or (b"content-length" in self.head.lower())
        self._tail = seen[-KEPT:]

    def connection_lost(self, reason: Exception | None) -> None:
        self.ended_at_s = time.monotonic()
        if not self.ended.done():
            self.ended.set_result(None)


async def open_streams(port: int, bodies: list[dict[str, Any]], **headers: str) -> list[Stream]:
    """Send all the requests, each on its own connection."""
    loop = asyncio.get_running_loop()

    async def connect(body: dict[str, Any]) -> Stream:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        _, stream = await loop.create_connection(lambda: Stream(body, named), "127.0.0.1", port)
        return stream

    return list(await asyncio.gather(*map(connect, bodies)))


async def all_ended(streams: list[Stream], timeout_s: float) -> None:
    """Wait for every stream to end."""
    async with asyncio.timeout(timeout_s):
        await asyncio.gather(*(stream.ended for stream in streams))


async def reached(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Poll until the condition holds."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"waited {timeout_s} s in vain for {what}"
        await asyncio.sleep(0.05)


def body(tokens: int, **options: Any) -> dict[str, Any]:
    return {"model": "demo", "prompt": "a b c", "max_tokens": tokens, "stream": True} | options
