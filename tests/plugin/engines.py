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
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor


@dataclass(frozen=True)
class Text:
    """A prompt and the tokens that must follow it."""

    prompt: list[int]
    forced: list[int]


# Log-probabilities by text index and position; the engine runs in this process and writes here.
_recorded: dict[int, list[torch.Tensor]] = {}


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
        _recorded[index] = []

        def force(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            # A preempted request is computed again: what counts is the position, not the call.
            del _recorded[index][len(output_ids) :]
            _recorded[index].append(logits.float().log_softmax(-1))
            only = torch.full_like(logits, -torch.inf)
            only[forced[len(output_ids)]] = 0
            return only

        return force


@contextmanager
def engine(model: Path, merge_interval: int | str | None, **options: Any) -> Iterator[LLM]:
    """An engine on the demo model; merge_interval None is vLLM without the section."""
    if merge_interval is not None:
        options["additional_config"] = {"deltalog": {"merge_interval": merge_interval}}
    defaults = {"max_model_len": 1024, "max_num_seqs": 8, "enforce_eager": True, "seed": 0}
    llm = LLM(str(model), logits_processors=[ForcedTokens], **(defaults | options))
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def teacher_forced(llm: LLM, texts: list[Text]) -> list[torch.Tensor]:
    """Log-probabilities [len(forced), vocabulary] of each text, all texts decoded concurrently."""
    params = [
        SamplingParams(
            max_tokens=len(text.forced),
            temperature=0,
            ignore_eos=True,
            extra_args={"text": index, "forced": text.forced},
        )
        for index, text in enumerate(texts)
    ]
    outputs = llm.generate([{"prompt_token_ids": text.prompt} for text in texts], params, use_tqdm=False)
    for text, output in zip(texts, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == text.forced
    return [torch.stack(_recorded[index]) for index in range(len(texts))]


def random_texts(lengths: list[int], tokens: int, seed: int, vocabulary: int = 1000) -> list[Text]:
    """Texts of random tokens with prompts of the given lengths."""
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> list[int]:
        return torch.randint(4, vocabulary, (count,), generator=generator).tolist()

    return [Text(draw(length), draw(tokens)) for length in lengths]


def worker_model(llm: LLM) -> torch.nn.Module:
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
