"""Functions that ranks run in the tests of sequence parallelism; importable by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config

from tests.core.batches import make_batch, make_groups
from tests.verl.training.ranks import VOCAB, tiny_config
from verl.batch import TokenBatch
from verl.config.policy import SELECTIVE
from verl.ext.sequence_parallel import SequenceParallelGroup, SlicedInputs, gathered
from verl.packing import PREFIXES, common_prefixes, split_by_work
from verl.training.attention import PACKED
from verl.training.models import LogProbModel, PackedInputs, ValueModel
from verl.training.worker import TrainerWorker

CPU = torch.device("cpu")
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "initializer_range": 0.1}  # fmt: skip
SHAPES = {
    "llama": LlamaConfig(**SIZES, num_key_value_heads=2),
    "one key head": LlamaConfig(**SIZES, num_key_value_heads=1),
    "qwen2, window": Qwen2Config(**SIZES, num_key_value_heads=2, use_sliding_window=True,
                                 sliding_window=5, max_window_layers=1),
}  # fmt: skip
CASES = [
    ("llama", False),
    ("one key head", True),
    ("qwen2, window", False),
    ("qwen2, window", True),
]
"""(shape, is_critic) of each test case."""


def language_model(shape: str) -> PreTrainedModel:
    """Build a random float64 model of that shape that recomputes its blocks in backward."""
    torch.manual_seed(0)
    config = SHAPES[shape]
    lm = AutoModelForCausalLM.from_config(config, attn_implementation=PACKED).double().train()
    lm.gradient_checkpointing_enable({"use_reentrant": False})
    return lm


def rows() -> Iterator[TokenBatch]:
    """Yield rows whose middle is inside a sequence, or inside a shared prompt.

    Others have an odd length, no targets in the second half, or no token at all.
    """
    yield make_batch([9, 21, 2, 6])
    yield make_batch([7, 1, 5])
    groups = make_groups([(3, [4]), (13, [5, 2, 4])])
    groups.columns[PREFIXES] = common_prefixes(groups)
    yield groups
    half = make_batch([14, 9])
    half.tokens["policy_mask"][10:] = False
    yield half
    yield make_batch([]).select([])


def gradients(
    module: nn.Module, sp_group: SequenceParallelGroup | None, is_critic: bool
) -> list[list[Tensor]]:
    """Return the outputs for each row, and the gradients that flow through this rank's slices."""
    forward: Any
    outputs, weights = [], torch.arange(40, dtype=torch.float64).sin()
    for batch in rows():
        inputs, forward = PackedInputs.of(batch, batch.tokens["policy_mask"], CPU), module
        if sp_group is not None:
            inputs, forward = SlicedInputs.divide(inputs, sp_group, CPU), gathered(module)
        results = [forward(inputs)] if is_critic else [*forward(inputs, 0.7, True)]
        loss = sum((x * weights[: len(x)]).sum() + x.mean() ** 2 for x in results if len(x))
        (loss if isinstance(loss, Tensor) else 0 * results[0].sum()).backward()
        outputs += [x.detach() for x in results]
    return [outputs, [p.grad for p in module.parameters()]]


def compare(rank: int, size: int, port: int) -> dict[str, list[list[list[Tensor]]]]:
    """Return, for each case, the results of a single rank and of the group, gradients summed."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank,
                            world_size=size)  # fmt: skip
    sp_group, by_case = SequenceParallelGroup.join(size), {}
    for shape, is_critic in CASES:
        results = []
        for group in (None, sp_group):
            lm = language_model(shape)
            module = ValueModel(lm).double() if is_critic else LogProbModel(lm)
            if isinstance(module, ValueModel):
                nn.init.normal_(module.value_head.weight)
            outputs, grads = gradients(module, group, is_critic)
            if group is not None:
                for gradient in grads:
                    dist.all_reduce(gradient)
            results.append([outputs, grads])
        by_case[f"{shape}, {'critic' if is_critic else 'policy'}"] = results
    dist.destroy_process_group()
    return by_case


def learn(rank: int, size: int, port: int, model: str, sp_size: int) -> dict[str, Any]:
    """Run passes and updates of actor and critic with several micro-batches and shared prompts."""
    config = tiny_config(model, size)
    config.actor_rollout_ref.actor.ulysses_sequence_parallel_size = sp_size
    config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu = 24 // sp_size
    config.critic.ppo_max_token_len_per_gpu = 24 // sp_size
    config.actor_rollout_ref.model.enable_gradient_checkpointing = True
    if sp_size > 1:
        config.critic.model.enable_gradient_checkpointing = SELECTIVE
    worker: Any = TrainerWorker(config, rank, size, "127.0.0.1", port, 10)
    results: dict[str, Any] = {"metrics": [], "answers": {}, "parts": [], "lengths": []}
    calls = (worker.actor.log_probs, worker.reference.log_probs, worker.critic.values)
    for step, groups in enumerate(([(5, [9, 4]), (7, [10]), (3, [3, 2, 6])], [(4, [7])])):
        batch = make_groups(groups, step)
        batch.columns[PREFIXES] = common_prefixes(batch)
        split = split_by_work(batch, size // sp_size)
        shard = split.shards[rank // sp_size]
        results["parts"].append(split.parts)
        results["lengths"].append(batch.lengths.tolist())
        results["answers"] |= {(number, step): call(shard) for number, call in enumerate(calls)}
        results["metrics"] += [worker.critic.update(shard), worker.actor.update(shard)]
    for name, trained in worker.models.items():
        results[name] = {key: x.clone() for key, x in trained.full_parameters()}
    worker.shutdown()
    return results
