"""One step of TRL's trainers with given scores, to get the advantages that they compute.

The policy is a random model of a few thousand parameters, whose outputs do not matter.
"""

import tempfile
from collections.abc import Sequence
from typing import Any

from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

TRAINERS = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}


def tiny_model() -> tuple[Qwen2ForCausalLM, PreTrainedTokenizerFast]:
    words = {word: i for i, word in enumerate(["<pad>", "<eos>", "a", "b", "c", "d"])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="a"))
    tokenizer.pre_tokenizer = Whitespace()
    config = Qwen2Config(
        vocab_size=len(words), hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    return Qwen2ForCausalLM(config), fast


def advantages(
    name: str, scores: Sequence[float | None], num_generations: int, **options: Any
) -> list[float]:
    """Return the advantage of each trajectory; a score of None means that it could not be scored.

    Trajectories of the same prompt are adjacent.
    """
    trainer_class, config_class = TRAINERS[name]
    model, tokenizer = tiny_model()
    with tempfile.TemporaryDirectory() as folder:
        config = config_class(
            output_dir=folder, use_cpu=True, bf16=False, report_to=[], max_steps=1,
            per_device_train_batch_size=len(scores), gradient_accumulation_steps=1,
            num_generations=num_generations, max_completion_length=2, beta=0.0,
            save_strategy="no", logging_strategy="no", disable_tqdm=True, **options,
        )  # fmt: skip
        prompts = Dataset.from_dict({"prompt": ["a b"] * (len(scores) // num_generations)})
        trainer = trainer_class(
            model=model, reward_funcs=lambda completions, **_: list(scores), args=config,
            train_dataset=prompts, processing_class=tokenizer,
        )  # fmt: skip
        trainer.train()
        return list(trainer._logs["advantages"])
