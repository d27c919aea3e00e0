"""Plain ``vllm serve`` with the package and one flag, without Ray: compiled, as vLLM does by default."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from engines import ADDITIONAL
from waiting import free_ports


def vllm_serve(model: Path, section: object, port: int, log: Path) -> subprocess.Popen:
    additional = json.dumps(ADDITIONAL | {"deltalog": section})
    command = [Path(sys.executable).with_name("vllm"), "serve", model, "--additional-config", additional]
    flags = ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "512"]
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # opens /collective_rpc, by which the test reads the counters
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    }
    with log.open("w") as output:
        return subprocess.Popen([*command, *flags], env=environment, stdout=output, stderr=output)


def merges(client: httpx.Client) -> int:
    reply = client.post("/collective_rpc", json={"method": "deltalog_counters"}).raise_for_status()
    [counters] = reply.json()["results"]
    return counters["merges"]


def test_vllm_serve_decodes_with_a_log(demo_model, tmp_path):
    port, log = free_ports(1)[0], tmp_path / "serve.log"
    server = vllm_serve(demo_model, {"merge_interval": 8}, port, log)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            deadline = time.monotonic() + 150
            while True:
                assert server.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() < deadline, log.read_text()[-3000:]
                try:
                    if client.get("/health").status_code == 200:
                        break
                except httpx.TransportError:
                    time.sleep(0.5)  # the interval of the poll
            body = {
                "model": str(demo_model),
                "prompt": "The log of a slot",
                "max_tokens": 33,
                "ignore_eos": True,
            }
            before = merges(client)
            answer = client.post("/v1/completions", json=body).raise_for_status().json()
            assert answer["usage"]["completion_tokens"] == 33
            merged = merges(client) - before
    finally:
        server.terminate()
        server.wait(30)
    prompt = answer["usage"]["prompt_tokens"]
    merging = [position for position in range(prompt, prompt + 32) if position % 8 == 7]
    assert merged == 3 * len(merging) == 12


@pytest.mark.parametrize("interval", [0, "fast"])
def test_vllm_serve_refuses_a_bad_interval_at_once(demo_model, tmp_path, interval):
    log = tmp_path / "serve.log"
    server = vllm_serve(demo_model, {"merge_interval": interval}, free_ports(1)[0], log)
    assert server.wait(90) != 0
    assert f'expected "auto" or an integer from 1 (write-through) to 64, got {interval!r}' in log.read_text()
