"""How many replicas a pool wants, from what it would predict with one less and one more."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, inf

from service.routing.policy import ReplicaView

PLACES_FULL = 0.9
"""Share of its places at which a replica has as many requests as it should."""


@dataclass(frozen=True)
class Bounds:
    """margin: share of the SLO at which another replica is wanted. keep: share below which a replica that
    still has requests is given up. hold_s: how long that must be so. cold_start_s: what a start takes."""

    minimum: int
    maximum: int
    tpot_ms: float
    margin: float = 0.9
    keep: float = 0.8
    hold_s: float = 20.0
    cold_start_s: float = 30.0


@dataclass
class Offered:
    """What requests bring, rejected ones included: rates averaged over about ``window_s`` seconds."""

    window_s: float = 15.0
    requests: float = 0.0
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    _rates: tuple[float, float, float] = (0.0, 0.0, 0.0)
    _since_s: float = 0.0

    def note(self, prompt_tokens: int, output_tokens: int) -> None:
        """One more request."""
        self.requests += 1
        self.prompt_tokens += prompt_tokens
        self.output_tokens += output_tokens

    def rates(self, now_s: float) -> tuple[float, float, float]:
        """Requests, prompt tokens and output tokens a second, as of now."""
        passed = now_s - self._since_s
        if passed > 0:
            weight = 1 - exp(-passed / self.window_s)
            new = (self.requests / passed, self.prompt_tokens / passed, self.output_tokens / passed)
            self._rates = tuple(  # type: ignore[assignment]
                old + weight * (rate - old) for old, rate in zip(self._rates, new, strict=True)
            )
            self.requests = self.prompt_tokens = self.output_tokens = 0.0
            self._since_s = now_s
        return self._rates


@dataclass(frozen=True)
class Load:
    """What a pool carries. views: replicas that serve; starting: those that do not yet. waiting: requests
    that no replica takes. The rates are those of Offered."""

    views: Sequence[ReplicaView]
    starting: int = 0
    waiting: int = 0
    requests_per_s: float = 0.0
    prompt_tokens_per_s: float = 0.0
    output_tokens_per_s: float = 0.0

    @property
    def rows(self) -> int:
        return sum(view.rows for view in self.views) + self.waiting


@dataclass
class Autoscaler:
    """Desired replicas of one pool, asked every few seconds. The victims are the newest."""

    bounds: Bounds
    _past: list[tuple[float, float]] = field(default_factory=list)
    _less_since_s: float | None = None

    def desired(self, now_s: float, load: Load) -> int:
        """Replicas wanted now, starting ones included. No requests means no load."""
        bounds, count = self.bounds, len(load.views) + load.starting
        growth = self._growth(now_s, load.requests_per_s)
        wanted = max(count, bounds.minimum)
        while wanted < bounds.maximum and step_ms(load, wanted, growth) > bounds.margin * bounds.tpot_ms:
            wanted += 1
        if wanted > count or not self._less_will_do(load, count, growth):
            self._less_since_s = None
            return wanted
        if self._less_since_s is None:
            self._less_since_s = now_s
        if now_s - self._less_since_s < bounds.hold_s:
            return count
        self._less_since_s = None
        return count - 1

    def _less_will_do(self, load: Load, count: int, growth: float) -> bool:
        """An empty victim costs nobody anything; one with requests is given up only with room to spare."""
        if count <= self.bounds.minimum or load.starting or not load.views:
            return False
        newest = max(load.views, key=lambda view: view.order)
        limit = self.bounds.keep if newest.rows else self.bounds.margin
        return step_ms(load, count - 1, growth) <= limit * self.bounds.tpot_ms

    def _growth(self, now_s: float, rate: float) -> float:
        """What the rate of requests will be after a cold start, as a multiple of now; 1 at least."""
        self._past.append((now_s, rate))
        while self._past[0][0] < now_s - self.bounds.cold_start_s:
            self._past.pop(0)
        then_s, before = self._past[0]
        if not rate or now_s <= then_s:
            return 1.0
        return 1 + max(0.0, rate - before) / rate * self.bounds.cold_start_s / (now_s - then_s)


def step_ms(load: Load, replicas: int, growth: float = 1.0) -> float:
    """Step time if the load were spread over this many replicas: the larger of what the requests in flight
    make of it and what the offered tokens will, by Little's law. Infinite without places for them."""
    if not load.views:
        return 0.0
    if not replicas:
        return inf if load.rows or load.requests_per_s else 0.0
    model = load.views[0].model
    now = model.steady_step_ms(load.rows / replicas, load.prompt_tokens_per_s / replicas)
    # rows = tokens a second * step time, and step time = (fixed + slope * rows) / idle.
    idle = 1 - model.prefill_token_ms * growth * load.prompt_tokens_per_s / replicas / 1000
    output_per_ms = growth * load.output_tokens_per_s / replicas / 1000
    left = idle - model.slope_ms * output_per_ms
    offered = model.fixed_ms / left if left > 0 else inf
    rows = max(load.rows / replicas, output_per_ms * offered)
    return inf if rows > PLACES_FULL * load.views[0].rows_limit else max(now, offered)
