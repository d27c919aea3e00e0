import sys
from pathlib import Path

import pytest
from torch import Tensor

# The tests share helpers; importlib mode puts no folder of tests on the path.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def poisoned_pages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Fill every state page with NaN bit patterns when a DeltaLog layer binds it; lists those layers."""
    from deltalog_kernels.vllm_plugin.layers import LoggedLayer

    bind, bound = LoggedLayer.bind_kv_cache, []

    def poison_and_bind(self: LoggedLayer, kv_cache: Tensor) -> None:
        kv_cache.fill_(-1)  # int8: 0xFF in every byte is NaN in bf16 and fp32
        bind(self, kv_cache)
        bound.append(self.prefix)

    monkeypatch.setattr(LoggedLayer, "bind_kv_cache", poison_and_bind)
    return bound
