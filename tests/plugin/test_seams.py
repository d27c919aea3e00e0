"""Each name of vLLM's that the plugin builds upon: broken in turn, it is named and decode is stock."""

from importlib import import_module
from pathlib import Path

import engines
import pytest
from engines import Difference, engine, random_texts, teacher_forced
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from deltalog_kernels.vllm_plugin import seams, support
from deltalog_kernels.vllm_plugin.pages import recurrent_layout

HERE = [seam for seam in seams.SEAMS if seam.platform in (None, current_platform.device_type)]


@pytest.fixture
def fresh(monkeypatch):
    """Probes and what depends on them, asked anew in this test and after it."""
    for cached in (seams.broken, seams.problems_here):
        cached.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    for cached in (seams.broken, seams.problems_here):
        cached.cache_clear()


def configure(model: Path, **options):
    section = {"deltalog": {"merge_interval": 8}}
    return EngineArgs(
        str(model), max_model_len=512, additional_config=section, **options
    ).create_engine_config()


def test_none_is_broken_in_the_vllm_that_is_installed():
    assert seams.broken() == ()


@pytest.mark.parametrize("seam", HERE, ids=lambda seam: seam.target.rpartition(".")[2])
def test_a_broken_seam_names_itself_and_decode_is_stock(seam, demo_model, fresh):
    config = configure(demo_model)
    assert recurrent_layout(config) is not None
    module, _, path = seam.target.partition(":")
    owner, _, name = path.rpartition(".")
    seams.broken.cache_clear()
    seams.problems_here.cache_clear()
    if path:
        holder = import_module(module)
        for part in filter(None, owner.split(".")):
            holder = getattr(holder, part)
        # A class that inherits the name has it still; one of its own without parameters hides that.
        fresh.setattr(holder, name, lambda: None)
    else:
        fresh.delattr(import_module(module), seam.names[0])
    [fault] = [fault for fault in seams.broken() if fault.startswith(f"expected {seam.target} ")]
    assert seam.why in fault
    assert f"in vLLM {seams.vllm_version}" in fault
    assert recurrent_layout(config) is None
    # A class that is broken breaks the seams of its methods too; the first is given.
    assert support.aside(config) in seams.broken()


def test_a_target_that_is_gone_is_named_too():
    gone = seams.Seam("vllm.config:NoSuchThing", (), "nothing")
    assert gone.fault() == "expected vllm.config:NoSuchThing (nothing), got " + repr(
        AttributeError("module 'vllm.config' has no attribute 'NoSuchThing'")
    )
    assert "ModuleNotFoundError" in str(seams.Seam("vllm.no_such_module", ("x",), "nothing").fault())


def test_an_engine_that_stands_aside_is_stock_bit_for_bit_and_says_so(demo_model, fresh):
    texts = random_texts([3, 40], tokens=12, seed=1)
    with engine(demo_model, None) as llm:
        stock = teacher_forced(llm, texts)
    fresh.setattr(seams, "broken", lambda: ("expected a seam, got none",))
    with engine(demo_model, 8) as llm:
        aside = teacher_forced(llm, texts)
        counters = llm.collective_rpc("deltalog_counters")
        context = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    assert Difference.of(aside, stock) == Difference(0.0, 0.0)
    assert counters == [{"standing_aside": "expected a seam, got none"}]
    assert "DeltaLog" not in str({type(layer) for layer in context.values()})


def test_speculative_decoding_is_left_to_vllm(demo_model):
    ngram = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    config = configure(demo_model, speculative_config=ngram)
    assert "no speculative decoding" in str(support.aside(config))
    assert recurrent_layout(config) is None


def test_a_replay_of_vllms_own_is_left_to_it(demo_model, monkeypatch):
    config = configure(demo_model)
    monkeypatch.setattr(config.cache_config, "use_replayssm", True)
    assert "no --use-replayssm" in str(support.aside(config))


assert engines  # sets the environment before vLLM is imported
