"""The demo model: identical in every build, ordinary to vLLM, and with a recurrent state that matters."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from deploy.demo_model import VOCAB_SIZE, build_demo_model

# One engine in a process of its own: prints the log-probabilities after each prompt, and one greedy answer.
ENGINE = """
import json, sys
from vllm import LLM, SamplingParams

model, prompts, vocab_size = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
llm = LLM(model, enforce_eager=True, max_model_len=1024, max_logprobs=vocab_size)
one = SamplingParams(max_tokens=1, temperature=0, logprobs=vocab_size)
rows = []
for ids in prompts:
    first = llm.generate({"prompt_token_ids": ids}, one, use_tqdm=False)[0].outputs[0].logprobs[0]
    rows.append([first[token].logprob for token in range(vocab_size)])
greedy = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)
chat = llm.chat([{"role": "user", "content": "What is a log?"}], greedy, use_tqdm=False)[0].outputs[0]
with open(sys.argv[4], "w") as file:
    json.dump({"logprobs": rows, "answer": list(chat.token_ids)}, file)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_demo_model(tmp_path_factory.mktemp("built") / "model")


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_two_builds_are_identical(model: Path, tmp_path: Path) -> None:
    other = build_demo_model(tmp_path / "other")
    assert contents(other) == contents(model)
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= set(
        contents(model)
    )


def test_an_up_to_date_model_is_left_alone(model: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in model.iterdir()}
    build_demo_model(model)
    assert {path.name: path.stat().st_mtime_ns for path in model.iterdir()} == before


def test_an_outdated_model_is_replaced_whole(model: Path, tmp_path: Path) -> None:
    outdated = tmp_path / "model"
    outdated.mkdir()
    (outdated / "recipe.sha256").write_text("another recipe")
    (outdated / "left-over.txt").write_text("from an earlier recipe")
    assert contents(build_demo_model(outdated)) == contents(model)
    assert list(tmp_path.iterdir()) == [outdated], "the build left something beside the model"


def test_a_strangers_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("three years of work")
    with pytest.raises(FileExistsError, match="choose another directory"):
        build_demo_model(tmp_path)
    assert (tmp_path / "thesis.txt").exists()


def test_state_matters_in_stock_vllm(model: Path, tmp_path: Path) -> None:
    """Attention switched off, an early token still reaches the logits: through the recurrent state alone."""
    recurrent = tmp_path / "recurrent"
    shutil.copytree(model, recurrent)
    weights = load_file(recurrent / "model.safetensors")
    weights["model.layers.3.self_attn.o_proj.weight"].zero_()
    save_file(weights, recurrent / "model.safetensors", metadata={"format": "pt"})

    prompt = [4 + (37 * i) % (VOCAB_SIZE - 4) for i in range(400)]
    changed = [*prompt[:-200], prompt[-200] + 1, *prompt[-199:]]
    answers = tmp_path / "answers.json"
    subprocess.run(
        [
            sys.executable,
            "-c",
            ENGINE,
            recurrent,
            json.dumps([prompt, prompt, changed]),
            str(VOCAB_SIZE),
            answers,
        ],
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"},
        check=True,
    )
    result = json.loads(answers.read_text())

    first, again, other = result["logprobs"]
    assert again == first, "the comparison below needs a deterministic engine"
    assert max(first) - min(first) > 5, "flat logits"
    # One token of four hundred, two hundred tokens ago; the bf16 paths of one model differ by about 0.03.
    assert max(abs(a - b) for a, b in zip(first, other, strict=True)) > 0.1
    assert len(set(result["answer"])) > 16, "the answer repeats itself"
