"""The pool over replicas that a fault has hit: what is asked again, where, and what the client gets."""

from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from service.api import pool as pools
from service.api.pool import Pool
from service.engine.protocol import Answer, Call, Message
from service.errors import engine_dead
from service.pools import PoolConfig

CONFIG = PoolConfig(name="test", model="m", replicas=2, max_concurrent_requests=2)
SERVED = [None, Answer(200, "{}")]
DEAD = [Answer.of(engine_dead())]


class Replies:
    """What a replica says to one request."""

    def __init__(self, messages: list[Message | None]) -> None:
        self._messages = iter(messages)

    def __aiter__(self) -> "Replies":
        return self

    async def __anext__(self) -> Message | None:
        for message in self._messages:
            return message
        raise StopAsyncIteration

    def cancel(self) -> None:
        pass


class Handle:
    """Serve's handle of a deployment; each request is given to the replica that `pick` says."""

    def __init__(self, pick: Callable[[int], list[Message | None]]) -> None:
        self.asked = 0
        self._pick = pick
        self.answer = self

    def options(self, **_: Any) -> "Handle":
        return self

    def remote(self, call: Call) -> Replies:
        self.asked += 1
        return Replies(self._pick(self.asked))


async def answer_of(
    monkeypatch: pytest.MonkeyPatch, handle: Handle, live: int = 1
) -> tuple[Answer, dict[str, Any]]:
    monkeypatch.setattr(pools, "FULL_PERIOD_S", 0.001)
    pool, record = Pool(CONFIG, handle), {}  # type: ignore[arg-type, var-annotated]
    pool._live = live
    messages: AsyncGenerator[Message, None] = pool.answer(Call("completion", {}, "id"), record)
    (answer,) = [message async for message in messages]
    assert isinstance(answer, Answer)
    return answer, record


@pytest.mark.asyncio
async def test_a_replica_whose_engine_is_dead_is_asked_until_another_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It answers at once, so that Serve picks it again and again while its process is there."""
    handle = Handle(lambda asked: DEAD if asked < 10 else SERVED)
    answer, record = await answer_of(monkeypatch, handle)
    assert (answer.status, handle.asked) == (200, 10)
    assert record["outcome"] == "ok"


@pytest.mark.asyncio
async def test_a_request_that_is_lost_after_it_was_taken_is_tried_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer, record = await answer_of(
        monkeypatch, Handle(lambda asked: [None, *DEAD] if asked == 1 else SERVED)
    )
    assert answer.status == 200
    assert record["tried_again"]
    handle = Handle(lambda asked: [None, *DEAD])
    answer, record = await answer_of(monkeypatch, handle)
    assert (answer.status, answer.code, handle.asked) == (503, "engine_dead", 2)
    assert record["outcome"] == "error"


@pytest.mark.asyncio
async def test_dead_engines_alone_are_not_asked_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = Handle(lambda asked: DEAD)
    pool_ready = [True, False]
    monkeypatch.setattr(
        Pool, "ready", property(lambda self: pool_ready.pop(0) if len(pool_ready) > 1 else False)
    )
    answer, record = await answer_of(monkeypatch, handle)
    assert (answer.status, answer.code) == (503, "not_ready")
    assert record["outcome"] == "rejected"
