import pytest
import torch

# The tensors are tiny: a second thread costs more than it brings.
torch.set_num_threads(1)


@pytest.fixture
def generator() -> torch.Generator:
    # A fresh seed each run; pytest prints it when a test fails.
    seed = torch.seed() % 2**31
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)
