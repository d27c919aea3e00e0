from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from running_service import RunningService, configuration, running


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The service that tests share starts after those that have services of their own: two at a time would
    take the processors from each other."""
    items.sort(key=lambda item: "service" in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def service(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """The one service that the tests share, with DeltaLog on at M = 8; it must stop without a trace."""
    with running(configuration(demo_model), tmp_path_factory.mktemp("service")) as service:
        yield service


@pytest.fixture
def client(service: RunningService) -> openai.OpenAI:
    return service.client()
