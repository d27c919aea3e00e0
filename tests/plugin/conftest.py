import json
from pathlib import Path

import pytest
import torch
from configurations import KIMI, QWEN35
from torch import Tensor


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


CONFIGURATIONS = {"qwen3_5": QWEN35, "kimi": KIMI}
KINDS = {"qwen": "Qwen3NextForCausalLM"} | {
    kind: config["architectures"][0] for kind, config in CONFIGURATIONS.items()
}


def verified_kinds() -> list[str]:
    from deltalog_kernels.vllm_plugin.seams import VERIFIED

    here = VERIFIED["cuda" if torch.cuda.is_available() else "cpu"]
    return [kind for kind, architecture in KINDS.items() if architecture in here]


@pytest.fixture(scope="session", params=verified_kinds())
def engine_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model, and on a GPU also others of its size, once they are verified there."""
    if request.param == "qwen":
        return request.getfixturevalue("demo_model")
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "config.json").write_text(json.dumps(CONFIGURATIONS[request.param]))
    return folder
