"""Which ports listen, and that nothing beyond the API and the metrics answers a stranger."""

import re
import socket
import struct
from collections import defaultdict
from pathlib import Path

import grpc
import httpx
import pytest
from ray.serve.generated.serve_pb2 import ASGIRequest
from ray.serve.generated.serve_pb2_grpc import ASGIServiceStub
from running_service import RunningService, descendants

LISTEN = "0A"

# What README documents, by the process that listens. Ray takes the numbers of its own ports at random.
LOOPBACK = {
    "haproxy": "the API",
    "ray::ServeReplica:deltalog:ingress": "the ingress, behind HAProxy",
    "ray::ProxyActor": "Serve's own proxy, which nothing asks",
    "ray::DashboardAgent": "Ray's agent",
    "engine": "torch's process group",
}
ANYWHERE = {
    "ray::DashboardAgent": "metrics, and Ray's agent",
    "ray::RuntimeEnvAgent": "Ray's agent",
    "gcs_server": "Ray's RPC",
    "raylet": "Ray's RPC",
    "python": "Ray's RPC of the process that started it, and metrics of its monitors",
    "ray::ServeController": "Ray's RPC",
    "ray::HAProxyManager": "Ray's RPC",
    "ray::ProxyActor": "Ray's RPC",
    "ray::ServeReplica:deltalog:ingress": "Ray's RPC and gRPC handles",
    "ray::ServeReplica:deltalog:test": "Ray's RPC and gRPC handles",
}


def listening(service: RunningService) -> dict[str, set[tuple[bool, int]]]:
    """Ports by process, each with whether it is on loopback alone."""
    sockets = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = fields = line.split()
            if state == LISTEN:
                address, port = local.split(":")
                # Words of the address are printed in the byte order of the machine.
                words = [struct.pack("=I", int(address[i : i + 8], 16)) for i in range(0, len(address), 8)]
                family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
                text = socket.inet_ntop(family, b"".join(words))
                sockets[fields[9]] = (text.startswith("127.") or text == "::1", int(port, 16))
    found, engines = defaultdict(set), service.engines()
    for pid, command in descendants(service.folder).items():
        name = Path(command.split(" ")[0]).name if not command.startswith("ray::") else command
        # ray::SERVE_REPLICA::<application>#<deployment>#<id>:<class>.<method>
        name = "engine" if pid in engines else re.sub(r"^ray::SERVE_REPLICA::.*?:", "ray::", name)
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            target = descriptor.readlink().name if descriptor.is_symlink() else ""
            inode = target.removeprefix("socket:[").removesuffix("]")
            if inode in sockets:
                found[name.split(".")[0]].add(sockets[inode])
    return found


@pytest.fixture(scope="module")
def ports(service: RunningService) -> dict[str, set[tuple[bool, int]]]:
    return listening(service)


def test_the_ports_are_those_that_are_documented(
    service: RunningService, ports: dict[str, set[tuple[bool, int]]]
) -> None:
    assert ports["haproxy"] == {(True, service.config["port"])}, "the API alone, where it was told to"
    for name, sockets in ports.items():
        for is_loopback, port in sockets:
            assert name in (LOOPBACK if is_loopback else ANYWHERE), f"{name} listens on {port}"


def test_ray_turns_strangers_away(service: RunningService, ports: dict[str, set[tuple[bool, int]]]) -> None:
    """Handles carry pickles, so that whoever may call a replica runs code in it: every open port of a replica
    asks for the cluster's token."""
    open_ports = [port for loopback, port in ports["ray::ServeReplica:deltalog:test"] if not loopback]
    assert open_ports
    refused = 0
    for port in open_ports:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = ASGIServiceStub(channel).HandleRequest
            with pytest.raises(grpc.RpcError) as error:
                call(ASGIRequest(pickled_request_metadata=b"", request_args=b""), timeout=10)
        assert error.value.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED)
        refused += error.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert refused, "one of them is the port of the handles"


def test_rays_agents_turn_strangers_away(ports: dict[str, set[tuple[bool, int]]]) -> None:
    """The agents that speak HTTP can start jobs."""
    for name in ("ray::DashboardAgent", "ray::RuntimeEnvAgent"):
        for _, port in ports[name]:
            try:
                response = httpx.post(f"http://127.0.0.1:{port}/api/job_agent/jobs/", json={}, timeout=5)
            except httpx.TransportError:
                continue  # Not HTTP, or not on this address.
            assert response.status_code in (401, 403, 404, 405), (name, port)
