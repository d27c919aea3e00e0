"""In-process vLLM engines and teacher-forced decoding, for comparing two ways to decode one text.

Free-running greedy decoding is useless for that: bf16 logits tie, one tie broken the other way changes
the rest of the text. So the next token is forced and every position's logits are kept.
"""

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# In-process: deterministic batches, pages that a test can poison, and two seconds to start.
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # One thread, free to move: two that wait for each other crawl when the machine is busy.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

import torch
from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.platforms import current_platform
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor.interface import (
    LogitsContext,
    LogitsProcessor,
    LogitsProcRequestState,
)

from deltalog_kernels.vllm_plugin.seeded_weights import LOAD_FORMAT

# On a GPU: decode in FULL CUDA graphs; vLLM's other backend of GDN prefill is compiled when first used.
PLATFORM: dict[str, Any] = (
    {"enforce_eager": True}
    if current_platform.is_cpu()
    else {
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
        # As on the CPU. vLLM checks the share and, with the bytes given, measures nothing.
        "kv_cache_memory_bytes": 2**30,
        "gpu_memory_utilization": 0.05,
    }
)
ADDITIONAL: dict[str, Any] = {} if current_platform.is_cpu() else {"gdn_prefill_backend": "triton"}


@dataclass(frozen=True)
class Text:
    """A prompt and the tokens that must follow it."""

    prompt: list[int]
    forced: list[int]


# What is kept of each position's log-probabilities: all, or the tokens at these indices.
kept: slice | torch.Tensor = slice(None)
# Log-probabilities by text and position; the engine runs in this process and writes here.
_recorded: dict[int, list[list[torch.Tensor]]] = {}


class ForcedTokens(AdapterLogitsProcessor):
    """Keeps each position's log-probabilities, then leaves the forced token alone to be sampled."""

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        pass

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Callable[..., torch.Tensor] | None:
        if params.extra_args is None:
            return None
        index, forced = params.extra_args["text"], params.extra_args["forced"]

        def force(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            return _record_and_force(index, forced, len(output_ids), logits)

        return force


class ForcedTokensV2(LogitsProcessor):
    """The same for the runner that vLLM has on a GPU."""

    def __init__(self, vllm_config: Any, req_states: LogitsProcRequestState) -> None:
        self.texts: dict[int, dict[str, Any]] = {}
        self.prompt_len = req_states.prompt_len

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        self.texts[req_idx] = sampling_params.extra_args or {}
        return bool(self.texts[req_idx])

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        for row, (request, length) in enumerate(
            zip(ctx.idx_mapping_np, ctx.seq_lens_upper_bound_np, strict=False)
        ):
            text = self.texts.get(int(request))
            position = int(length) - int(self.prompt_len.np[request])
            # Negative: the end of a chunk that does not complete its prompt.
            if text and 0 <= position < len(text["forced"]):
                logits[row] = _record_and_force(text["text"], text["forced"], position, logits[row])
        return logits


def _record_and_force(index: int, forced: list[int], position: int, logits: torch.Tensor) -> torch.Tensor:
    _recorded[index][position].append(logits.float().log_softmax(-1)[kept])
    only = torch.full_like(logits, -torch.inf)
    only[forced[position]] = 0
    return only


@contextmanager
def engine(model: Path, merge_interval: int | str | None, **options: Any) -> Iterator[LLM]:
    """An engine on the demo model; merge_interval None is vLLM without the section."""
    additional = {} if merge_interval is None else {"deltalog": {"merge_interval": merge_interval}}
    defaults = {"max_model_len": 1024, "max_num_seqs": 8, "disable_log_stats": False} | PLATFORM
    processors = [ForcedTokens if current_platform.is_cpu() else ForcedTokensV2]
    options = defaults | options | {"additional_config": ADDITIONAL | additional}
    if not (model / "tokenizer.json").exists():  # of this one only the configuration is at hand
        options |= {"skip_tokenizer_init": True, "load_format": LOAD_FORMAT}
    llm = LLM(str(model), logits_processors=processors, **options)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def _forcing(index: int, text: Text, samples: int) -> SamplingParams:
    _recorded[index] = [[] for _ in text.forced]
    return SamplingParams(
        n=samples,
        max_tokens=len(text.forced),
        temperature=0 if samples == 1 else 1,
        ignore_eos=True,
        extra_args={"text": index, "forced": text.forced},
    )


def _logprobs(index: int, samples: int) -> torch.Tensor:
    # vLLM also samples, and throws away, at the end of each chunk that does not complete its prompt.
    return torch.cat([torch.stack(position[-samples:]) for position in _recorded[index]])


def teacher_forced(llm: LLM, texts: list[Text], samples: int = 1) -> list[torch.Tensor]:
    """Log-probabilities [len(forced) * samples, vocabulary] of each text, all texts decoded concurrently."""
    params = [_forcing(index, text, samples) for index, text in enumerate(texts)]
    prompts = [{"prompt_token_ids": text.prompt} for text in texts]
    for text, output in zip(texts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        assert all(list(sample.token_ids) == text.forced for sample in output.outputs)
    return [_logprobs(index, samples) for index in range(len(texts))]


def scheduled(
    llm: LLM,
    texts: list[Text],
    arrivals: list[int],
    aborts: dict[int, int] | None = None,
    after_step: Callable[[LLM], object] = lambda llm: None,
) -> dict[int, torch.Tensor]:
    """As teacher_forced, but text i arrives before engine step arrivals[i], and leaves before aborts[i].

    Returns the log-probabilities of the texts that were not aborted, by index.
    """
    aborts, engine, step = aborts or {}, llm.llm_engine, 0
    while step <= max(arrivals) or engine.has_unfinished_requests():
        for index, arrival in enumerate(arrivals):
            if arrival == step:
                params = _forcing(index, texts[index], 1)
                engine.add_request(str(index), {"prompt_token_ids": texts[index].prompt}, params)
        engine.abort_request([str(index) for index, leaves in aborts.items() if leaves == step])
        engine.step()
        after_step(llm)
        step += 1
    return {index: _logprobs(index, 1) for index in range(len(texts)) if index not in aborts}


def metric(llm: LLM, name: str) -> float:
    """Sum of one of vLLM's counters."""
    return sum(metric.value for metric in llm.get_metrics() if metric.name == name)


def random_texts(lengths: list[int], tokens: int | list[int], seed: int) -> list[Text]:
    """Texts of random tokens with prompts of the given lengths, each followed by its number of tokens."""
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> list[int]:
        return torch.randint(4, 1000, (count,), generator=generator).tolist()

    counts = [tokens] * len(lengths) if isinstance(tokens, int) else tokens
    return [Text(draw(length), draw(count)) for length, count in zip(lengths, counts, strict=True)]


@dataclass(frozen=True)
class Difference:
    """Of log-probabilities; NaN anywhere makes both infinite."""

    largest: float
    mean: float

    @classmethod
    def of(cls, a: list[torch.Tensor], b: list[torch.Tensor]) -> "Difference":
        gap = (torch.cat(a) - torch.cat(b)).abs().nan_to_num(nan=torch.inf)
        return cls(gap.max().item(), gap.mean().item())

    def within(self, bound: "Difference") -> bool:
        return self.largest <= bound.largest and self.mean <= bound.mean


# vLLM's C++ state update differs from the same arithmetic in fp32 torch by 2e-3 a step, and its logits are
# bf16 (steps of 0.06 at 16): whatever the merge interval, ours differ from stock by 0.031 on average in
# log-probability, whose own spread is 3, and by 0.5 in the farthest of 800,000. Twice that:
TO_STOCK = Difference(largest=1.0, mean=0.06)


def worker_model(llm: LLM) -> torch.nn.Module:
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
