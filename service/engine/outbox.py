"""Where the tokens of a stream wait for others to travel with."""

import asyncio
from collections.abc import AsyncGenerator

from service.engine.protocol import Answer, Usage
from service.pools import PoolConfig


class Outbox:
    """Events of one stream, from the engine that puts them in to the replica that reads them.

    A message between processes costs far more than a token, so tokens share messages: the first event goes at
    once, and then what has come whenever `coalesce_tokens` events are together or `coalesce_ms` have passed
    since the last message. Nothing that is in waits for what is not there yet.
    """

    def __init__(self, pool: PoolConfig) -> None:
        self._most = pool.coalesce_tokens
        self._period_s = pool.coalesce_ms / 1000
        self._events: list[str] = []
        self._end: Answer | Usage | BaseException | None = None
        self._due = asyncio.Event()
        """Set when there is a reason to send before the time is up."""
        self._wanted = 1

    def put(self, event: str) -> None:
        """Add one SSE event with its closing blank line."""
        self._events.append(event)
        if len(self._events) >= self._wanted:
            self._due.set()

    def close(self, end: Answer | Usage | BaseException) -> None:
        """No event follows: a Usage ends the stream as it should, an Answer before its time."""
        self._end = end
        self._due.set()

    async def texts(self) -> AsyncGenerator[Answer | str | Usage, None]:
        """What was put in, in order, several events in one text; then the end. Raises a closing exception."""
        loop = asyncio.get_running_loop()
        while True:
            self._wanted = 1
            await self._wait()
            if self._events:
                yield self._take()
            if self._end is not None and not self._events:
                break
            self._wanted = self._most
            handle = loop.call_later(self._period_s, self._due.set)
            await self._wait()
            handle.cancel()
        if isinstance(self._end, BaseException):
            raise self._end
        yield self._end

    async def _wait(self) -> None:
        if len(self._events) < self._wanted and self._end is None:
            self._due.clear()
            await self._due.wait()

    def _take(self) -> str:
        text = "".join(self._events)
        self._events.clear()
        return text
