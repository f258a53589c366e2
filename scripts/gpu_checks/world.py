"""Creates models, a tokenizer, batches and questions without the hub or a network."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from verl.batch import TokenBatch
from verl.config import Config
from verl.core_algos.losses import loss_weights
from verl.preflight.undecided import fill_undecided

END = "<|im_end|>"
TINY = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 258}  # fmt: skip
QWEN = {"vocab_size": 151936, "num_key_value_heads": 2}
SHAPES = {
    "tiny": TINY,
    "0.5B": QWEN | {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
                    "num_attention_heads": 14},
    "1.5B": QWEN | {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
                    "num_attention_heads": 12},
    "3B": QWEN | {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
                  "num_attention_heads": 16},
}  # fmt: skip
"""Published sizes of Qwen2.5; `tiny` has heads of 32, the smallest that vLLM supports on CPU."""
ACTOR, CRITIC = "actor_rollout_ref.actor", "critic"


def write_model(
    folder: Path, shape: str, seed: int = 0, device: str = "cpu", dtype: str = "float32"
) -> str:
    """Write random weights of a shape and a byte-level tokenizer; returns the path."""
    sizes: dict[str, Any] = dict(SHAPES[shape])
    # Logits have a standard deviation of about 0.6 at any width, so that log-probs differ.
    std = 0.6 / sizes["hidden_size"] ** 0.5
    config = Qwen2Config(
        **sizes, tie_word_embeddings=True, max_position_embeddings=4096, initializer_range=std,
        bos_token_id=None, eos_token_id=256, pad_token_id=257,
    )  # fmt: skip
    torch.manual_seed(seed)
    with torch.device(device):
        model = Qwen2ForCausalLM(config).to(getattr(torch, dtype))
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return str(folder)


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer with a token per byte, an end of sequence (256) and padding (257)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END, "<|endoftext|>"])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token="<|endoftext|>"
    ).save_pretrained(folder)


def small_run(model: str, device: str, dtype: str = "float32", **changes: Any) -> Config:
    """Return options for one rank with KL and entropy in the loss, without offloading.

    `changes` are further options by key, with `__` for dots.
    """
    base = {
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        "critic.model.enable_gradient_checkpointing": False,
        f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_coef": 0.1, f"{ACTOR}.entropy_coeff": 0.01,
        f"{ACTOR}.optim.lr": 1e-3, f"{CRITIC}.optim.lr": 1e-3, f"{ACTOR}.grad_clip": 0.5,
        "algorithm.adv_estimator": "grpo", "trainer.n_gpus_per_node": 1,
        "data.train_batch_size": 16, "data.val_batch_size": 16,
        "trainer.device": device, "trainer.compute_dtype": dtype,
    }  # fmt: skip
    return fill_undecided(Config(), base | {k.replace("__", "."): v for k, v in changes.items()})


def random_batch(lengths: list[int], vocab: int = 250, seed: int = 0) -> TokenBatch:
    """Return a mini-batch with all columns of an update; the first two tokens are the prompt."""
    generator = torch.Generator().manual_seed(seed)
    total, offsets = sum(lengths), torch.tensor([0, *lengths]).cumsum(0)
    mask = torch.rand(total, generator=generator) < 0.6
    for start in offsets[:-1].tolist():
        mask[start : start + 2] = False

    def column(scale: float = 1.0) -> Tensor:
        return scale * torch.randn(total, generator=generator)

    names = ("old_log_probs", "ref_log_probs", "rollout_log_probs")
    return TokenBatch(
        offsets,
        {
            "input_ids": torch.randint(0, vocab, (total,), generator=generator),
            "policy_mask": mask,
            "advantages": column(),
            "values": column(0.2),
            "returns": column(),
            "loss_weights": loss_weights(mask, offsets, "token-mean"),
            **{name: -5.5 + column(0.3) for name in names},
        },
        columns={"group": [f"g{i}" for i in range(len(lengths))]},
    )


def write_questions(path: Path, count: int = 8) -> None:
    """Write questions in the format of the training data."""
    truth = {"style": "rule", "ground_truth": {"target": ["Accra"]}}
    rows = [
        {"data_source": "nq", "prompt": [{"role": "user", "content": f"Question {i}?"}],
         "ability": "fact-reasoning", "reward_model": truth,
         "extra_info": {"split": "train", "index": i}}
        for i in range(count)
    ]  # fmt: skip
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def write_demonstrations(path: Path, count: int = 8) -> None:
    """Write dialogues with one search, for the supervised training of the tiny policy."""
    segments = [
        {"origin": "policy", "text": "<search> capital of Ghana </search>"},
        {"origin": "observation", "text": "\n\n<information>Doc 1</information>\n\n"},
        {"origin": "policy", "text": "<answer> Accra </answer>"},
    ]
    prompts = ([{"role": "user", "content": f"Question {i}?"}] for i in range(count))
    rows = [{"prompt": prompt, "segments": segments} for prompt in prompts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
