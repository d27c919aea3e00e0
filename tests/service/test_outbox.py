"""Tokens that travel together: what is sent when, and that nothing is lost or late."""

import asyncio
import time
from collections.abc import AsyncGenerator

import pytest

from service.engine.outbox import Outbox
from service.engine.protocol import Answer, Usage
from service.pools import PoolConfig

END = Usage(3, 5)
NEVER_MS = 600_000.0


def outbox(tokens: int = 4, ms: float = NEVER_MS) -> Outbox:
    return Outbox(PoolConfig(name="p", model="m", coalesce_tokens=tokens, coalesce_ms=ms))


async def soon(texts: AsyncGenerator[object, None]) -> object:
    async with asyncio.timeout(10):
        return await anext(texts)


@pytest.mark.asyncio
async def test_the_first_goes_alone_and_the_rest_together() -> None:
    box = outbox()
    texts = box.texts()
    box.put("1")
    assert await soon(texts) == "1"
    for event in "2345":
        box.put(event)
    assert await soon(texts) == "2345"
    box.put("6")
    box.close(END)
    assert [text async for text in texts] == ["6", END]


@pytest.mark.asyncio
async def test_time_sends_what_is_not_full() -> None:
    box = outbox(ms=20)
    texts = box.texts()
    box.put("1")
    await soon(texts)
    box.put("2")
    started_at_s = time.monotonic()
    assert await soon(texts) == "2"
    assert time.monotonic() - started_at_s >= 0.015, "it has to wait for company"


@pytest.mark.asyncio
async def test_a_slow_stream_does_not_wait() -> None:
    """A token that comes long after the one before it goes at once."""
    box = outbox(ms=5)
    texts = box.texts()
    box.put("1")
    await soon(texts)
    reading = asyncio.create_task(soon(texts))
    await asyncio.sleep(0.1)
    box.put("2")
    # The reader runs in the next turns of the loop, with no timer between.
    for _ in range(5):
        await asyncio.sleep(0)
    assert reading.done()
    assert reading.result() == "2"


@pytest.mark.asyncio
async def test_what_came_while_nobody_read_goes_in_one() -> None:
    box = outbox(tokens=2, ms=1)
    for event in "12345":
        box.put(event)
    box.close(END)
    assert [text async for text in box.texts()] == ["12345", END]


@pytest.mark.asyncio
async def test_a_stream_that_ends_early_says_so_last() -> None:
    box, failure = outbox(), Answer(503, "{}")
    box.put("1")
    box.close(failure)
    assert [text async for text in box.texts()] == ["1", failure]


@pytest.mark.asyncio
async def test_an_exception_comes_after_what_was_sent() -> None:
    box = outbox()
    box.put("1")
    box.close(ZeroDivisionError())
    texts = box.texts()
    assert await soon(texts) == "1"
    with pytest.raises(ZeroDivisionError):
        await soon(texts)
