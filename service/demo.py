"""The demo: start the service as a user would, talk to it with the openai client, print what was counted."""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from openai import AsyncOpenAI, OpenAIError
from rich.console import Console
from rich.table import Table

from service.config import ServiceConfig, load_config
from service.launch import METRICS_PERIOD_S, LaunchError, check
from service.metrics.log import BYTE_KINDS, MERGES, STATE_BYTES, WRITE_THROUGH_BYTES
from service.metrics.requests import GENERATED_TOKENS, TPOT, TPOT_SUM
from service.scrape import Scrape

STREAMS = 16
TOKENS = 97
"""Tokens of each stream: one of prefill and 96 decode steps, whole cycles of every M up to 32."""

START_TIMEOUT_S = 240
STOP_TIMEOUT_S = 60
SETTLE_TIMEOUT_S = 60
SETTLE_PERIOD_S = METRICS_PERIOD_S + 2
"""Longer than a replica takes to publish its counters and Ray to export them."""


class DemoError(LaunchError):
    """The demo did not run to its end. The message says what was expected and what came."""


def run_demo(path: Path, console: Console) -> None:
    """Serve the configuration at `path`, use it once, report and stop. Raises ConfigError and LaunchError."""
    config = load_config(path)
    if len(config.pools) != 1:
        raise DemoError(
            f"{path}: pools: expected one, which the figures are of; got {len(config.pools)}; take one"
        )
    (pool,) = config.pools
    if pool.merge_interval is None:
        raise DemoError(
            f"{path}: expected a pool with DeltaLog on; got merge_interval null; set it, say to 8"
        )
    # Somebody else's service on these ports would answer in the place of ours.
    check(config)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with _service(path, config):
        try:
            tokens = asyncio.run(_talk(config, console))
            console.print("\nReading the metrics once they have settled ...")
            _report(_settled(config, tokens), console)
        except (OpenAIError, httpx.HTTPError) as error:
            raise DemoError(f"expected an answer from the service; got {error}; its logs say why") from error


@contextmanager
def _service(path: Path, config: ServiceConfig) -> Iterator[None]:
    """`python -m service serve` in a process of its own, ready to answer."""
    process = subprocess.Popen([sys.executable, "-m", "service", "serve", str(path)])
    try:
        _wait_ready(process, f"{config.url}/health/ready")
        yield
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise DemoError(
                f"expected the service to stop within {STOP_TIMEOUT_S} s; it did not and was killed; "
                "its logs say why"
            ) from None


def _wait_ready(process: "subprocess.Popen[bytes]", url: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise DemoError(
                f"expected the service to start; it ended with code {process.returncode}, see above"
            )
        try:
            if httpx.get(url, timeout=10).is_success:
                return
        except httpx.TransportError:
            pass  # Nothing listens yet.
        time.sleep(0.5)
    raise DemoError(
        f"expected the service to be ready within {START_TIMEOUT_S} s; it is not; its logs say why"
    )


async def _talk(config: ServiceConfig, console: Console) -> int:
    """One chat completion, then the concurrent streams. Returns the tokens generated."""
    (pool,) = config.pools
    client = AsyncOpenAI(base_url=f"{config.url}/v1", api_key="none", max_retries=0)
    chat = await client.chat.completions.create(
        model=pool.model_id, messages=[{"role": "user", "content": "What is a log?"}], max_tokens=32
    )
    assert chat.usage is not None
    console.print("\nOne chat completion:")
    console.print(f"  {chat.choices[0].message.content!r}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"{STREAMS} concurrent streams, as they end:")

    async def stream(index: int) -> int:
        chunks = await client.completions.create(
            model=pool.model_id,
            prompt="The state of a linear-attention layer is a matrix. " * (1 + index % 8),
            max_tokens=TOKENS,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        text, tokens = "", 0
        async for chunk in chunks:
            text += "".join(choice.text for choice in chunk.choices)
            tokens = chunk.usage.completion_tokens if chunk.usage else tokens
        console.print(
            f"  {index:2d}: {tokens} tokens {text[:64]!r}", markup=False, highlight=False, soft_wrap=True
        )
        return tokens

    return chat.usage.completion_tokens + sum(await asyncio.gather(*map(stream, range(STREAMS))))


def _settled(config: ServiceConfig, tokens: int) -> Scrape:
    """The metrics once every token is counted and the counters stand still."""
    url = f"http://127.0.0.1:{config.metrics_port}/metrics"
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    before, now = None, Scrape(url)
    while now.total(GENERATED_TOKENS) < tokens or before is None or _counters(before) != _counters(now):
        if time.monotonic() > deadline:
            raise DemoError(
                f"expected the metrics to count {tokens} tokens; got {now.total(GENERATED_TOKENS):.0f}"
            )
        time.sleep(SETTLE_PERIOD_S)
        before, now = now, Scrape(url)
    return now


def _counters(scrape: Scrape) -> tuple[float, ...]:
    return scrape.total(MERGES), scrape.total(STATE_BYTES), scrape.total(WRITE_THROUGH_BYTES)


def _report(scrape: Scrape, console: Console) -> None:
    written = scrape.total(STATE_BYTES, direction="write")
    write_through = scrape.total(WRITE_THROUGH_BYTES, direction="write")
    if not (scrape.total(MERGES) and written):
        raise DemoError("expected merges and written bytes to be counted; got none; is DeltaLog on?")
    table = Table(title="What the service counted", show_header=False)
    tpot_s = scrape.total(TPOT_SUM) / scrape.total(TPOT, "_count")
    table.add_row("TPOT, mean over requests", f"{tpot_s * 1e3:.1f} ms")
    table.add_row("merges", f"{scrape.total(MERGES):,.0f}")
    for kind in BYTE_KINDS:
        table.add_row(
            f"state bytes written by {kind}",
            f"{scrape.total(STATE_BYTES, direction='write', kind=kind):,.0f}",
        )
    table.add_row("state bytes written", f"{written:,.0f}")
    table.add_row("what write-through would have written", f"{write_through:,.0f}")
    table.add_row("write-through / DeltaLog", f"{write_through / written:.2f}")
    console.print(table)
    console.print(
        "The model's weights are random: its text means nothing. On a CPU this shows correctness and bytes, "
        "not speed. `make serve` keeps the service up for requests of your own (README).",
        soft_wrap=True,
    )
