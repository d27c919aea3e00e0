"""Policies of others, to compare with, and to fall back on where a router has no view."""

import random

from service.routing.policy import (
    Ask,
    Decision,
    Pools,
    Reason,
    ReplicaView,
    cannot_take,
    predicted_tpot_ms,
    predicted_ttft_ms,
)


class _WithoutSlo:
    """Fills a replica until it has no row left."""

    def choose(self, pools: Pools, ask: Ask) -> Decision:
        refused: dict[str, Reason] = {}
        for rank, views in enumerate(pools):
            able = []
            for view in views:
                reason = cannot_take(view, ask)
                if reason is None:
                    able.append(view)
                else:
                    refused[view.replica] = reason
            if able:
                view = self.among(able, ask)
                tpot, ttft = predicted_tpot_ms(view, ask), predicted_ttft_ms(view, ask)
                return Decision(view.replica, Reason.BALANCE, rank > 0, tpot, ttft, refused)
        return Decision(None, refused=refused)

    def among(self, able: list[ReplicaView], ask: Ask) -> ReplicaView:
        raise NotImplementedError


class LeastLoaded(_WithoutSlo):
    """The replica with the fewest requests; also what a router does without a view."""

    def among(self, able: list[ReplicaView], ask: Ask) -> ReplicaView:
        return min(able, key=lambda view: (view.rows, view.order))


class PowerOfTwo(_WithoutSlo):
    """The less loaded of two at random, which is Ray Serve's own policy."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def among(self, able: list[ReplicaView], ask: Ask) -> ReplicaView:
        pair = self._random.sample(able, 2) if len(able) > 1 else able
        return min(pair, key=lambda view: view.rows)


class RoundRobin(_WithoutSlo):
    """Each replica in turn."""

    def __init__(self) -> None:
        self._turn = 0

    def among(self, able: list[ReplicaView], ask: Ask) -> ReplicaView:
        self._turn += 1
        return able[self._turn % len(able)]


class PrefixAffinity(_WithoutSlo):
    """The replica whose cache saves most; without a hit the least loaded."""

    def among(self, able: list[ReplicaView], ask: Ask) -> ReplicaView:
        return max(able, key=lambda view: (ask.saved_ms.get(view.replica, 0.0), -view.rows, -view.order))
