"""Load on the service while its boards are looked at, and the client's own view of it."""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from openai import AsyncOpenAI, OpenAIError

STREAMS = 8
SENTENCE = "The state of a linear-attention layer is a matrix. "
MOST_SENTENCES = 12
TOKENS = (24, 96)
"""Fewest and most tokens of a stream."""
SEED = 10


@dataclass
class Load:
    """What came of the load, as the client saw it."""

    tpots_s: list[float] = field(default_factory=list)
    """TPOT of each stream: (last token - first token) / (tokens - 1)."""
    tokens: int = 0
    failed: int = 0

    @property
    def mean_tpot_s(self) -> float | None:
        """Mean over the streams; None while none has ended."""
        return sum(self.tpots_s) / len(self.tpots_s) if self.tpots_s else None


async def put_load(
    url: str, models: list[str], seconds: float, progress: Callable[[Load, float], None]
) -> Load:
    """Keep `STREAMS` streams open for `seconds`. `progress` is told, again and again, what came so far."""
    load, started_s = Load(), time.monotonic()
    dice = random.Random(SEED)

    async def told() -> None:
        while True:
            progress(load, time.monotonic() - started_s)
            await asyncio.sleep(0.5)

    async def keep_streaming(client: AsyncOpenAI, index: int) -> None:
        while time.monotonic() - started_s < seconds:
            try:
                await _stream(client, models[index % len(models)], dice, load)
            except OpenAIError:
                load.failed += 1
                await asyncio.sleep(1)

    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        teller = asyncio.create_task(told())
        try:
            await asyncio.gather(*(keep_streaming(client, index) for index in range(STREAMS)))
        finally:
            teller.cancel()
    return load


async def _stream(client: AsyncOpenAI, model: str, dice: random.Random, load: Load) -> None:
    chunks = await client.completions.create(
        model=model,
        prompt=SENTENCE * dice.randint(1, MOST_SENTENCES),
        max_tokens=dice.randint(*TOKENS),
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    first_s = last_s = 0.0
    async for chunk in chunks:
        if chunk.choices:
            last_s = time.monotonic()
            first_s = first_s or last_s
        if chunk.usage and (tokens := chunk.usage.completion_tokens) > 1:
            load.tokens += tokens
            load.tpots_s.append((last_s - first_s) / (tokens - 1))
