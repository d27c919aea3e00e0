"""Build the demo model: a tiny Qwen3-Next with seeded random weights, as an ordinary Hugging Face directory.

Three Gated DeltaNet layers and one attention layer, about four million parameters. The text it writes means
nothing; its recurrent state matters to every logit, which is what the demo and the tests need.
"""

import hashlib
import math
import tempfile
from pathlib import Path
from typing import Annotated

import torch
import typer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3NextConfig, Qwen3NextForCausalLM

SEED = 20260815
VOCAB_SIZE = 1024
END, ROLES = "<|end|>", ["<|system|>", "<|user|>", "<|assistant|>"]
CORPUS = sorted((Path(__file__).parent / "corpus").glob("*.txt"))
RECIPE_FILE = "recipe.sha256"

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

# Decay of each value head for an average token: from a word to a few pages of memory.
HEAD_DECAYS = [0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999]


def build_demo_model(out_dir: Path) -> Path:
    """Publish the model at `out_dir` in one rename and return it; do nothing when it is already there.

    Two builds with the same library versions give identical files. Raises FileExistsError when `out_dir`
    holds something that is not a demo model.
    """
    recipe = hashlib.sha256(b"".join(path.read_bytes() for path in [Path(__file__), *CORPUS])).hexdigest()
    if out_dir.exists():
        if not (out_dir / RECIPE_FILE).is_file():
            raise FileExistsError(
                f"expected {out_dir} to be absent or an earlier demo model (with {RECIPE_FILE}), "
                "found something else; choose another directory or remove this one"
            )
        if (out_dir / RECIPE_FILE).read_text() == recipe:
            return out_dir
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out_dir.parent, prefix=f".{out_dir.name}-") as scratch:
        fresh = Path(scratch) / "fresh"
        tokenizer = _train_tokenizer()
        tokenizer.save_pretrained(fresh)
        _seeded_model(tokenizer.eos_token_id).save_pretrained(fresh)
        (fresh / RECIPE_FILE).write_text(recipe)
        if out_dir.exists():
            out_dir.rename(Path(scratch) / "outdated")
        fresh.rename(out_dir)
    return out_dir


def _train_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END, *ROLES],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([path.read_text(encoding="utf-8") for path in CORPUS], trainer)
    found = tokenizer.get_vocab_size()
    if found != VOCAB_SIZE:
        raise ValueError(f"expected text for {VOCAB_SIZE} tokens, deploy/corpus gave {found}; add text to it")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, chat_template=CHAT_TEMPLATE, model_max_length=4096
    )


def _seeded_model(eos_token_id: int) -> Qwen3NextForCausalLM:
    config = Qwen3NextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=4,
        linear_num_value_heads=len(HEAD_DECAYS),
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        # vLLM wants one MoE layer. It uses all its experts: a hard choice would turn rounding into jumps.
        mlp_only_layers=[0, 1, 2],
        num_experts=4,
        num_experts_per_tok=4,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        max_position_embeddings=4096,
        eos_token_id=eos_token_id,
        dtype="bfloat16",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = Qwen3NextForCausalLM(config)
        _scale_weights(model)
    model.generation_config = GenerationConfig(eos_token_id=eos_token_id)
    return model.to(torch.bfloat16)


@torch.no_grad()
def _scale_weights(model: Qwen3NextForCausalLM) -> None:
    """Give every projection unit gain, and every Gated DeltaNet head its decay from HEAD_DECAYS."""
    for name, weight in model.named_parameters():
        if weight.dim() >= 2:
            weight.normal_(std=weight.shape[-1] ** -0.5)
        elif name.endswith("dt_bias"):
            weight.zero_()
        elif name.endswith("A_log"):
            # decay = exp(-exp(A_log) * softplus(a + dt_bias)); softplus(0) = ln 2.
            weight.copy_((-torch.tensor(HEAD_DECAYS).log() / math.log(2)).log())
    model.model.embed_tokens.weight.normal_(std=1.0)
    model.lm_head.weight.mul_(3.0)


def main(
    out_dir: Annotated[Path, typer.Argument(help="Directory to write; skipped when up to date.")],
) -> None:
    """Build the demo model."""
    print(build_demo_model(out_dir))


if __name__ == "__main__":
    typer.run(main)
