"""CUDA graphs: batches that shrink through padded graphs, vLLM's default compilation, and the faults that
only a graph can have. The rest of this folder also decodes in FULL graphs on a GPU (engines.py)."""

from pathlib import Path

import pytest
import seeded
import torch
from engines import TO_STOCK, Difference, Text, engine, random_texts, teacher_forced

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_pages")]
OPTIONS = {"enable_prefix_caching": False, "max_num_seqs": 8}


@pytest.fixture(scope="module")
def texts() -> list[Text]:
    """Eight requests that end one after the other: 8 rows, then 7 in a graph of 8, ... then 1."""
    return random_texts([20, 21, 22, 23, 24, 25, 26, 27], tokens=list(range(20, 100, 10)), seed=1)


@pytest.fixture(scope="module")
def stock(engine_model: Path, texts: list[Text]) -> list[torch.Tensor]:
    return decode(engine_model, texts, None)


def decode(model: Path, texts: list[Text], interval: int | None, **options) -> list[torch.Tensor]:
    with engine(model, interval, **OPTIONS | options) as llm:
        return teacher_forced(llm, texts)


def test_batches_shrink_through_padded_graphs(engine_model, texts, stock):
    assert Difference.of(decode(engine_model, texts, 8), stock).within(TO_STOCK)


@pytest.mark.parametrize(
    "options", [{"compilation_config": {}}, {"compilation_config": {}, "async_scheduling": False}]
)
def test_vllms_default_compilation(engine_model, texts, stock, options):
    """torch.compile, PIECEWISE graphs for mixed batches and FULL ones for decodes."""
    assert Difference.of(decode(engine_model, texts, 8, **options), stock).within(TO_STOCK)


def test_stale_positions_show(engine_model, texts, stock, monkeypatch):
    seeded.with_stale_positions(monkeypatch)
    assert not Difference.of(decode(engine_model, texts, 8), stock).within(TO_STOCK)


def test_padding_that_decodes_shows(engine_model, texts, stock, monkeypatch):
    seeded.with_real_padding(monkeypatch)
    assert not Difference.of(decode(engine_model, texts, 8), stock).within(TO_STOCK)
