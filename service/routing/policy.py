"""Pack, spill or wait: which replica a request goes to.

The same objects decide in the Ray router and in the simulator. A decision is a function of the views and the
request alone, so routers that see the same decide alike without talking to each other: candidates are ranked
by age, and age is the same everywhere.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import ceil, inf
from types import MappingProxyType
from typing import Literal, Protocol

from service.routing.cost import StepModel

PREFILL_WINDOW = 128
"""Steps over which a replica averages the prompt tokens that it takes in."""
AFFINITY_MS = 20.0
"""Prefill that a cached prefix must save before it outweighs the order of the replicas."""

Consolidation = float | Literal["auto"]


class Reason(StrEnum):
    """Why a replica was chosen, or was not."""

    PACK = "pack"
    OPEN = "open"
    BALANCE = "balance"
    AFFINITY = "affinity"
    NO_VIEW = "no view of its pool"
    EMPTY = "empty, and no other is faster"
    NOT_READY = "not ready"
    ROWS = "no row free"
    MEMORY = "state and cache do not fit"
    TPOT = "TPOT over its margin"
    TTFT = "TTFT over its margin"


@dataclass(slots=True)
class ReplicaView:
    """What a router knows of a replica, its own dispatches since the last report included.

    order: age, the oldest first. rows: requests in flight. prefill_tokens: prompt tokens not yet taken in.
    prefill_per_step: mean of what its steps take in. free_tokens: what its state and cache memory still hold.
    strictest_tpot_ms: the lowest TPOT that a request on it was promised.
    """

    replica: str
    order: int
    model: StepModel
    rows_limit: int
    chunk_tokens: int
    ready: bool = True
    rows: int = 0
    prefill_tokens: int = 0
    prefill_per_step: float = 0.0
    free_tokens: float = inf
    strictest_tpot_ms: float = inf

    def sent(self, ask: "Ask") -> None:
        """A router sent it this request, and knows so before the replica reports it."""
        self.rows += 1
        self.prefill_tokens += ask.prompt_tokens
        self.free_tokens -= ask.prompt_tokens + ask.output_tokens
        self.strictest_tpot_ms = min(self.strictest_tpot_ms, ask.tpot_ms)

    def started(self, ask: "Ask") -> None:
        """The request has its first token: what its prompt cost is behind it, and in the mean."""
        self.prefill_tokens = max(0, self.prefill_tokens - ask.prompt_tokens)
        self.prefill_per_step += ask.prompt_tokens / PREFILL_WINDOW

    def finished(self, ask: "Ask") -> None:
        """The request has ended, however it did. What it was promised holds on until the next report."""
        self.rows = max(0, self.rows - 1)
        self.free_tokens += ask.prompt_tokens + ask.output_tokens


@dataclass(frozen=True, slots=True)
class Ask:
    """A request as a router sees it. saved_ms: prefill that a replica's prefix cache would save."""

    prompt_tokens: int
    output_tokens: int
    tpot_ms: float = inf
    ttft_ms: float = inf
    waited_ms: float = 0.0
    saved_ms: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a request goes; replica None: nowhere yet. refused: every replica that was not feasible."""

    replica: str | None
    reason: Reason | None = None
    spilled: bool = False
    tpot_ms: float = inf
    ttft_ms: float = inf
    refused: Mapping[str, Reason] = field(default_factory=lambda: MappingProxyType({}))

    def __str__(self) -> str:
        refused = "; ".join(f"{replica}: {reason}" for replica, reason in self.refused.items())
        chosen = (
            f"{self.replica} ({'spill, ' if self.spilled else ''}{self.reason}, TPOT {self.tpot_ms:.1f} ms, "
            f"TTFT {self.ttft_ms:.0f} ms)"
            if self.replica
            else f"whichever Serve picks ({self.reason})"
            if self.reason
            else "wait"
        )
        return f"{chosen}; refused {refused}" if refused else chosen


Pools = Sequence[Sequence[ReplicaView]]
"""The replicas of each pool that may serve the request, in its spill order."""


class Policy(Protocol):
    def choose(self, pools: Pools, ask: Ask) -> Decision: ...


def predicted_tpot_ms(view: ReplicaView, ask: Ask) -> float:
    """Mean step of the requests on this replica over PREFILL_WINDOW steps, with this one among them: as many
    prompt tokens as lately, and those that already wait to be taken in."""
    prefill = view.prefill_per_step + (view.prefill_tokens + ask.prompt_tokens) / PREFILL_WINDOW
    return view.model.step_ms(view.rows + 1, min(prefill, view.chunk_tokens))


def predicted_ttft_ms(view: ReplicaView, ask: Ask) -> float:
    """Time to the first token: half a step until the replica looks, then its backlog and this prompt."""
    model, saved = view.model, ask.saved_ms.get(view.replica, 0.0) if ask.saved_ms else 0.0
    tokens = view.prefill_tokens + ask.prompt_tokens
    decode = model.step_ms(view.rows + 1)
    steps = ceil(tokens / view.chunk_tokens)
    looks = 0.5 * decode if view.rows else 0.0
    return ask.waited_ms + looks + steps * decode + tokens * model.prefill_token_ms - saved


@dataclass(frozen=True)
class PackSpill:
    """Keep requests together as far as the SLOs allow.

    consolidation 0 balances: the replica with the shortest predicted step. 1 packs: the oldest replica
    within the margin. Between, an idle replica costs that share of its fixed step time. "auto" opens another
    replica only when those that are open have DeltaLog's break-even batch, and balances above it.
    margin: share of an SLO that predictions may use up.
    """

    consolidation: Consolidation = "auto"
    margin: float = 0.9

    def choose(self, pools: Pools, ask: Ask) -> Decision:
        refused: dict[str, Reason] = {}
        empty: list[tuple[int, int, ReplicaView, float, float]] = []
        for rank, views in enumerate(pools):
            feasible = []
            for view in views:
                tpot, ttft = predicted_tpot_ms(view, ask), predicted_ttft_ms(view, ask)
                reason = self._refusal(view, ask, tpot, ttft)
                if reason is None:
                    feasible.append((view, tpot, ttft))
                else:
                    refused[view.replica] = reason
                    if not view.rows and reason in (Reason.TPOT, Reason.TTFT):
                        empty.append((rank, view.order, view, tpot, ttft))
            if feasible:
                (view, tpot, ttft), reason = self._pick(feasible, ask)
                return Decision(view.replica, reason, rank > 0, tpot, ttft, refused)
        if not empty:
            return Decision(None, refused=refused)
        # Waiting makes nothing faster than an empty replica is.
        rank, _, view, tpot, ttft = min(empty, key=lambda each: each[:2])
        return Decision(view.replica, Reason.EMPTY, rank > 0, tpot, ttft, refused)

    def _refusal(self, view: ReplicaView, ask: Ask, tpot_ms: float, ttft_ms: float) -> Reason | None:
        reason = cannot_take(view, ask)
        if reason is not None:
            return reason
        if tpot_ms > self.margin * min(ask.tpot_ms, view.strictest_tpot_ms):
            return Reason.TPOT
        return Reason.TTFT if ttft_ms > self.margin * ask.ttft_ms else None

    def _pick(
        self, feasible: list[tuple[ReplicaView, float, float]], ask: Ask
    ) -> tuple[tuple[ReplicaView, float, float], Reason]:
        if ask.saved_ms:
            best = max(feasible, key=lambda each: (ask.saved_ms.get(each[0].replica, 0.0), -each[0].order))
            if ask.saved_ms.get(best[0].replica, 0.0) >= AFFINITY_MS:
                return best, Reason.AFFINITY
        if self.consolidation == "auto":
            short = [each for each in feasible if 0 < each[0].rows < each[0].model.break_even_rows]
            chosen = (
                min(short, key=lambda each: each[0].order)
                if short
                else min(feasible, key=lambda each: (each[1], each[0].rows, each[0].order))
            )
            return chosen, Reason.PACK if short else _opened(chosen[0])
        share = self.consolidation

        def cost(each: tuple[ReplicaView, float, float]) -> tuple[float, int, int]:
            view, tpot_ms, _ = each
            opening = 0.0 if view.rows else view.model.fixed_ms
            # Where rows cost nothing, balancing still has an even number of them everywhere.
            return (1 - share) * tpot_ms + share * opening, 0 if share else view.rows, view.order

        chosen = min(feasible, key=cost)
        packed = Reason.PACK if share > 0 and chosen[0].rows else _opened(chosen[0])
        return chosen, packed


def _opened(view: ReplicaView) -> Reason:
    return Reason.BALANCE if view.rows else Reason.OPEN


def cannot_take(view: ReplicaView, ask: Ask) -> Reason | None:
    """Why a replica could not hold the request at all, whatever was promised."""
    if not view.ready:
        return Reason.NOT_READY
    if view.rows >= view.rows_limit:
        return Reason.ROWS
    return Reason.MEMORY if ask.prompt_tokens + ask.output_tokens > view.free_tokens else None
