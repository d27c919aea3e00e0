"""Which node runs a replica, on nodes as Ray describes them."""

import pytest

from service.placement import misfit, overbooked
from service.pools import PoolConfig

H200 = {
    "Alive": True,
    "Resources": {"CPU": 64.0, "GPU": 8.0},
    "Labels": {"ray.io/accelerator-type": "H200", "zone": "a"},
}
RTX4090 = {
    "Alive": True,
    "Resources": {"CPU": 16.0, "GPU": 1.0, "fast_disk": 1.0},
    "Labels": {"ray.io/accelerator-type": "GeForce-RTX-4090"},
}
HEAD = {"Alive": True, "Resources": {"CPU": 4.0}, "Labels": {}}
DEAD = H200 | {"Alive": False, "Labels": {"zone": "b"}}
NODES = [HEAD, H200, RTX4090, DEAD]


def pool(**settings: object) -> PoolConfig:
    return PoolConfig.model_validate({"name": "p", "model": "m"} | settings)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"accelerator": "H200", "gpus_per_replica": 1},
        {"accelerator": "RTX4090", "gpus_per_replica": 1, "resources": {"fast_disk": 1}},
        {"gpus_per_replica": 8, "engine_args": {"tensor_parallel_size": 8}, "node_labels": {"zone": "a"}},
    ],
)
def test_it_fits(settings: dict[str, object]) -> None:
    assert misfit(pool(**settings), NODES) is None


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"node_labels": {"zone": "b"}}, "labels zone=b; got 3 nodes with zone=a"),
        (
            {"accelerator": "RTX4090", "gpus_per_replica": 1, "node_labels": {"zone": "a"}},
            "ray.io/accelerator-type=GeForce-RTX-4090, zone=a",
        ),
        ({"cpus_per_replica": 65}, "expected a node with 65 CPU for a replica; got 64 CPU at most"),
        (
            {"accelerator": "RTX4090", "gpus_per_replica": 2, "engine_args": {"tensor_parallel_size": 2}},
            "2 GPU for a replica; got 16 CPU, 1 GPU at most",
        ),
        ({"resources": {"slow_disk": 1}}, "1 slow_disk for a replica; got 64 CPU, 0 slow_disk at most"),
    ],
)
def test_it_does_not_fit(settings: dict[str, object], said: str) -> None:
    assert said in (misfit(pool(**settings), NODES) or "")


def test_all_together() -> None:
    one = pool(accelerator="H200", gpus_per_replica=1, replicas=6)
    assert overbooked([one], NODES) is None
    assert "expected to fit 84 CPU, 9 GPU that Ray finds; got 12 GPU" in (overbooked([one, one], NODES) or "")
