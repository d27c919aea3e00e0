from pathlib import Path

import pytest

from deploy.demo_model import build_demo_model


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model where `make` keeps it; built once, in seconds."""
    return build_demo_model(Path(__file__).parents[1] / ".cache" / "demo-model")
