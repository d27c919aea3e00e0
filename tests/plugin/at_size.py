"""One engine of a model at its full size, in a process of its own: ``python at_size.py JOB`` (JSON).

JOB: model, a directory; merge_interval, null for stock; engine options; seed; concurrent, one count of texts
for each run; fault, the name of a fault in seeded.py, or null; out, where the log-probabilities go.
"""

import json
import sys
from pathlib import Path

import engines
import pytest
import seeded
import torch
from vllm.platforms import current_platform

KEPT = 2048
"""Tokens whose log-probabilities are compared: all 248,320 would not fit beside the model."""
TOKENS = 48


def texts(count: int, seed: int) -> list[engines.Text]:
    lengths = torch.randint(20, 400, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return engines.random_texts(lengths, TOKENS, seed=seed + 1)


def main(job: dict) -> None:
    vocabulary = json.loads((Path(job["model"]) / "config.json").read_text())["vocab_size"]
    shuffled = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(job["seed"]))
    engines.kept = shuffled[:KEPT].to(current_platform.device_type)
    drawn = texts(max(job["concurrent"]), job["seed"])
    with pytest.MonkeyPatch.context() as patch:
        if job["fault"]:
            getattr(seeded, job["fault"])(patch)
        with engines.engine(Path(job["model"]), job["merge_interval"], **job["options"]) as llm:
            runs = [engines.teacher_forced(llm, drawn[:count]) for count in job["concurrent"]]
            torch.save([torch.stack(run).cpu() for run in runs], job["out"])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
