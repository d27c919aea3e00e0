"""Whether the nodes of a cluster can run a pool's replicas."""

from collections.abc import Iterable, Mapping
from typing import Any

from service.pools import PoolConfig


def needs(pool: PoolConfig) -> dict[str, float]:
    """What a replica takes of a node, by Ray's names."""
    needed = {"CPU": float(pool.cpus_per_replica), "GPU": float(pool.gpus_per_replica), **pool.resources}
    return {name: amount for name, amount in needed.items() if amount}


def misfit(pool: PoolConfig, nodes: Iterable[Mapping[str, Any]]) -> str | None:
    """Why no node runs a replica of `pool`, whatever else it runs; None when one does.

    `nodes` are as `ray.nodes()` returns them.
    """
    alive = [node for node in nodes if node["Alive"]]
    labelled = [node for node in alive if pool.placement.items() <= node["Labels"].items()]
    if not labelled:
        wanted = ", ".join(f"{key}={value}" for key, value in pool.placement.items())
        have = sorted(
            {
                f"{key}={node['Labels'][key]}"
                for node in alive
                for key in pool.placement
                if key in node["Labels"]
            }
        )
        return (
            f"pool {pool.name!r}: expected a node with the labels {wanted}; got {len(alive)} nodes with "
            f"{', '.join(have) or 'none of them'}; start one, or correct `accelerator` or `node_labels`"
        )
    needed = needs(pool)
    if any(
        all(node["Resources"].get(name, 0) >= amount for name, amount in needed.items()) for node in labelled
    ):
        return None
    most = {name: max(node["Resources"].get(name, 0.0) for node in labelled) for name in needed}
    return (
        f"pool {pool.name!r}: expected a node with {_listed(needed)} for a replica; got {_listed(most)} at "
        "most; lower what a replica takes, or start a larger node"
    )


def overbooked(pools: Iterable[PoolConfig], nodes: Iterable[Mapping[str, Any]]) -> str | None:
    """Why the cluster has no room for all replicas at once; None when it has."""
    needed: dict[str, float] = {}
    for pool in pools:
        for name, amount in needs(pool).items():
            needed[name] = needed.get(name, 0.0) + pool.replicas * amount
    alive = [node for node in nodes if node["Alive"]]
    have = {name: sum(node["Resources"].get(name, 0.0) for node in alive) for name in needed}
    short = {name: amount for name, amount in needed.items() if amount > have[name]}
    if not short:
        return None
    return (
        f"pools: cpus_per_replica, gpus_per_replica, resources: expected to fit {_listed(have)} that Ray "
        f"finds; got {_listed(short)} for all replicas; lower them"
    )


def _listed(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items())
