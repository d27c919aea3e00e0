"""The paper's two launches pass the check that the bench puts before its times: compiled or interpreted."""

import os

import pytest
import torch

from deltalog_kernels import GDN, KDA, LogLayout
from deltalog_kernels.bench import gpu
from deltalog_kernels.bench.gpu import Case

CUDA = torch.cuda.is_available()

pytestmark = [
    *([pytest.mark.gpu] if CUDA else []),
    pytest.mark.skipif(
        not (CUDA or os.environ.get("TRITON_INTERPRET") == "1"),
        reason="needs a CUDA GPU, or TRITON_INTERPRET=1 to interpret the kernels",
    ),
]


@pytest.mark.parametrize(
    "layout",
    [
        LogLayout(GDN, 1, 3, 32, 16, 4),
        LogLayout(GDN, 2, 2, 16, 64, 1),
        LogLayout(GDN, 1, 2, 64, 32, 3, state_dtype=torch.bfloat16),
        LogLayout(KDA, 1, 2, 32, 16, 3),
    ],
    ids=lambda layout: Case(layout, 1).name,
)
def test_two_launches_equal_write_through(layout, monkeypatch):
    from deltalog_kernels.bench.two_launch import two_launch_step

    monkeypatch.setattr(gpu, "DEVICE", "cuda" if CUDA else "cpu")
    gpu.check(Case(layout, 3), two_launch_step)
