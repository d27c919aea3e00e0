"""Where requests wait for a replica with room."""

import asyncio
import time
from bisect import bisect_right, insort
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import TypeVar

Placed = TypeVar("Placed")

MOST_TRIES = 32
"""Of those who wait, each time that something has changed; the next time goes on from there."""


@dataclass(order=True, slots=True)
class _Entry:
    priority: int
    number: int
    turn: asyncio.Event = field(compare=False, default_factory=asyncio.Event)


class Line:
    """Lower priorities go first, then who came first. Whenever something has changed the first one tries, and
    then, one after the other, those behind it: what is too large for the room that there is does not keep
    back what fits."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._numbers = count()
        self._tries = 0
        self._resume: _Entry | None = None
        """Where the last round ended, before all had tried."""

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
        insort(self._entries, entry)
        self.wake()
        try:
            async with asyncio.timeout(max(0.0, until_s - time.monotonic())):
                while True:
                    await entry.turn.wait()
                    entry.turn.clear()
                    placed = place()
                    if placed is not None:
                        return placed
                    self._pass_on(entry)
        finally:
            self._entries.remove(entry)
            self.wake()

    def wake(self) -> None:
        """Something has changed for those who wait."""
        self._tries = MOST_TRIES
        if self._entries:
            self._entries[0].turn.set()
        if self._resume in self._entries:
            self._resume.turn.set()
        self._resume = None

    def _pass_on(self, entry: _Entry) -> None:
        behind = bisect_right(self._entries, entry)
        if behind == len(self._entries):
            return
        self._tries -= 1
        if self._tries > 0:
            self._entries[behind].turn.set()
        else:
            self._resume = max(self._resume or entry, self._entries[behind])
