"""Requests over time: seeded random ones, and public traces where they are at hand."""

import csv
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from math import exp
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from service.config import ConfigError
from service.pools import Seconds, Settings


@dataclass(frozen=True, slots=True)
class Arrival:
    """prefix: requests with the same one share their first tokens."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    prefix: int | None = None


AS_LIST: Any = Field(strict=False)
"""A tuple that YAML writes as a list."""


class Phase(Settings):
    """So many requests a second for so long; with until_requests_per_s, a straight line to that."""

    requests_per_s: Annotated[float, Field(gt=0)]
    seconds: Seconds
    until_requests_per_s: Annotated[float, Field(gt=0)] | None = None

    def rate(self, at_s: float) -> float:
        """Requests a second, ``at_s`` into the phase."""
        last = self.requests_per_s if self.until_requests_per_s is None else self.until_requests_per_s
        return self.requests_per_s + (last - self.requests_per_s) * at_s / self.seconds


class Generator(Settings):
    """Poisson arrivals in phases; lengths are log-normal about their means."""

    phases: Annotated[tuple[Phase, ...], AS_LIST]
    prompt_tokens: int = 1024
    output_tokens: int = 256
    spread: float = 0.5
    burst: float = 1.0
    """Mean size of the groups that arrive at once; 1: one by one."""
    prefixes: int = 0
    """Distinct prompts that requests start with; 0: none shared."""

    def arrivals(self, seed: int) -> Iterator[Arrival]:
        draw, start_s = random.Random(seed), 0.0
        for phase in self.phases:
            for at_s in self._groups(phase, draw):
                for _ in range(_geometric(draw, self.burst)):
                    yield Arrival(
                        start_s + at_s,
                        _length(draw, self.prompt_tokens, self.spread),
                        _length(draw, self.output_tokens, self.spread),
                        draw.randrange(self.prefixes) if self.prefixes else None,
                    )
            start_s += phase.seconds

    def _groups(self, phase: Phase, draw: random.Random) -> Iterator[float]:
        """Arrival times in a phase: a Poisson process at the highest rate, thinned to each time's own."""
        highest, at_s = max(phase.rate(0.0), phase.rate(phase.seconds)), 0.0
        while (at_s := at_s + draw.expovariate(highest / self.burst)) < phase.seconds:
            if draw.random() * highest < phase.rate(at_s):
                yield at_s


def _geometric(draw: random.Random, mean: float) -> int:
    count = 1
    while mean > 1 and draw.random() > 1 / mean:
        count += 1
    return count


def _length(draw: random.Random, mean: int, spread: float) -> int:
    """Log-normal with this mean, one token at least."""
    return max(1, round(mean * exp(draw.gauss(-spread * spread / 2, spread)))) if spread else mean


def trace(path: Path, rate: float = 1.0, limit: int | None = None) -> Iterator[Arrival]:
    """Requests of a trace, ``rate`` times as fast: a CSV with TIMESTAMP, ContextTokens, GeneratedTokens, or
    JSON lines with timestamp in ms, input_length, output_length and hash_ids. Raises ConfigError."""
    try:
        with path.open(newline="") as file:
            rows = _csv(file) if path.suffix == ".csv" else _json_lines(file)
            first_s = None
            for count, (at_s, prompt, output, prefix) in enumerate(rows):
                if count == limit:
                    return
                first_s = at_s if first_s is None else first_s
                yield Arrival((at_s - first_s) / rate, max(1, prompt), max(1, output), prefix)
    except (OSError, KeyError, ValueError) as error:
        raise ConfigError(
            f"{path}: expected a trace (CSV with TIMESTAMP, ContextTokens, GeneratedTokens, or JSON lines "
            f"with timestamp, input_length, output_length); got {error!r}; correct the path or the file"
        ) from None


Row = tuple[float, int, int, int | None]


def _csv(file: Iterator[str]) -> Iterator[Row]:
    for row in csv.DictReader(file):
        # Seven digits of a second's fraction, of which Python takes six.
        at = datetime.fromisoformat(row["TIMESTAMP"][:26])
        yield at.timestamp(), int(row["ContextTokens"]), int(row["GeneratedTokens"]), None


def _json_lines(file: Iterator[str]) -> Iterator[Row]:
    for line in file:
        row = json.loads(line)
        prefix = row["hash_ids"][0] if row.get("hash_ids") else None
        yield row["timestamp"] / 1000, row["input_length"], row["output_length"], prefix
