"""The wheel alone: what it holds, and that vLLM finds and runs the plugin from it, far from the checkout."""

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Main process and engine process load the plugin each for itself.
ENGINE = """
import json, sys
from vllm import LLM, SamplingParams

llm = LLM(
    sys.argv[1],
    enforce_eager=True,
    max_model_len=512,
    additional_config={"deltalog": {"merge_interval": 8}},
)
(request,) = llm.generate("What is a log?", SamplingParams(max_tokens=33, ignore_eos=True))
(counts,) = llm.collective_rpc("deltalog_counters")
with open(sys.argv[2], "w") as file:
    json.dump({**counts, "tokens": len(request.outputs[0].token_ids)}, file)
"""


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
    pip = [sys.executable, "-m", "pip", "--python", python]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", wheel], check=True)
    (site_packages,) = venv.glob("lib/python*/site-packages")
    # Directories named by a .pth file are searched, but .pth files inside them are not read.
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return python.parent


def test_the_wheel_holds_deltalog_kernels_alone(wheel: Path) -> None:
    name, version, *_ = wheel.name.split("-")
    files = zipfile.ZipFile(wheel).namelist()
    assert {file.split("/")[0] for file in files} == {"deltalog_kernels", f"{name}-{version}.dist-info"}
    packaged = {file for file in files if file.startswith("deltalog_kernels/")}
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


def test_doctor_finds_the_plugin_ready(clean_bin: Path, tmp_path: Path) -> None:
    doctor = subprocess.run([clean_bin / "deltalog", "doctor"], cwd=tmp_path, capture_output=True, text=True)
    assert doctor.returncode == 0, doctor.stdout + doctor.stderr
    assert "plugin: ready for Qwen3NextForCausalLM" in doctor.stdout


def test_vllm_decodes_through_the_log(clean_bin: Path, demo_model: Path, tmp_path: Path) -> None:
    counts_file = tmp_path / "counts.json"
    subprocess.run(
        [clean_bin / "python", "-c", ENGINE, demo_model, counts_file],
        cwd=tmp_path,
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        check=True,
    )
    counts = json.loads(counts_file.read_text())
    assert counts["tokens"] == 33
    assert counts["merge_interval"] == 8
    recurrent_layers, cycles = 3, 4  # 32 decode steps; the first token comes from the prefill
    assert counts["merges"] == recurrent_layers * cycles
