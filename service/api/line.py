"""Where requests wait for a replica with room."""

import asyncio
import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import TypeVar

Placed = TypeVar("Placed")


@dataclass(order=True, slots=True)
class _Entry:
    priority: int
    number: int
    turn: asyncio.Event = field(compare=False, default_factory=asyncio.Event)


class Line:
    """Lower priorities go first, then who came first. The first tries whenever something has changed."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._entries)

    async def wait(self, priority: int, until_s: float, place: Callable[[], Placed | None]) -> Placed:
        """What `place` returns, at once where nobody is in front. Raises TimeoutError at `until_s`, a time of
        time.monotonic(), and what `place` raises."""
        entry = _Entry(priority, next(self._numbers))
        if not self._entries or entry < self._entries[0]:
            placed = place()
            if placed is not None:
                return placed
        heapq.heappush(self._entries, entry)
        try:
            async with asyncio.timeout(max(0.0, until_s - time.monotonic())):
                while True:
                    await entry.turn.wait()
                    entry.turn.clear()
                    placed = place() if self._entries[0] is entry else None
                    if placed is not None:
                        return placed
        finally:
            self._entries.remove(entry)
            heapq.heapify(self._entries)
            self.wake()

    def wake(self) -> None:
        """Something has changed for who waits first."""
        if self._entries:
            self._entries[0].turn.set()
