"""Supervised fine-tuning on demonstrations.

Uses the FSDP model, masks and packing of the RL trainer, so that only policy tokens are trained on.
Runs in one process, or on several ranks under `torchrun`.
"""

import contextlib
import logging
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm
from transformers import PretrainedConfig

from verl.agent.settings import copy_settings
from verl.batch import TokenBatch
from verl.checkpoint.exporting import whole_folder
from verl.config import OptimConfig
from verl.core_algos.losses import loss_weights, weighted_sum
from verl.ext.sft.checkpoints import Checkpoints
from verl.ext.sft.demonstrations import load_demonstrations
from verl.ext.sft.options import SCHEDULES, SftConfig
from verl.malloc import keep_freed_memory
from verl.model_files import check_model, load_tokenizer, model_errors
from verl.packing import split_by_work
from verl.plugins import imported, optional
from verl.ports import free_port
from verl.quantization import check_unquantized
from verl.remote_code import set_trust
from verl.training.actor import TargetColumns
from verl.training.devices import (
    join_process_group,
    resolve_device,
    resolve_dtype,
)
from verl.training.family import check_family
from verl.training.fsdp import FsdpModel, FsdpOptions, StepResult, all_reduced
from verl.training.loading import load_causal_lm
from verl.training.models import LogProbModel, PackedInputs, blocks
from verl.training.weights import copy_tokenizer, write_weights

logger = logging.getLogger(__name__)


def join_ranks(config: SftConfig) -> torch.device:
    """Join torchrun's process group, or create one of this process alone. Returns the device."""
    if "RANK" not in os.environ:
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        os.environ |= {**alone, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    if torch.cuda.is_available() and config.device != "cpu":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = resolve_device(config.device)
    if device.type == "cpu":
        cores = optional("verl.ext.cpu.cores")
        if cores is not None:
            cores.share_threads(int(os.environ["LOCAL_WORLD_SIZE"]))
    join_process_group(device, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    return device


def batches(
    data: TokenBatch, size: int, steps: int, shuffle: bool, seed: int, done: int = 0
) -> Iterator[TokenBatch]:
    """Yield batches of `size` sequences across epochs, with token-mean loss weights.

    There are `steps` of them; the first `done` are passed over.
    """
    rng = np.random.default_rng(seed)
    order: list[int] = [] if shuffle else list(range(seed * steps * size % len(data), len(data)))
    for step in range(steps):
        while len(order) < size:
            order += (rng.permutation(len(data)) if shuffle else np.arange(len(data))).tolist()
        rows, order = order[:size], order[size:]
        if step < done:
            continue
        batch = data.select(rows)
        mask = batch.tokens["policy_mask"]
        batch.tokens["loss_weights"] = loss_weights(mask, batch.offsets, "token-mean")
        yield batch


def train_step(model: FsdpModel, batch: TokenBatch, budget: int) -> tuple[float, StepResult]:
    """Do one update. Returns the mean loss per policy token (nats), and the optimizer's result."""
    shard = split_by_work(batch, dist.get_world_size()).shards[dist.get_rank()]
    losses = []
    for _, micro in model.micro_batches(shard, budget):
        inputs = PackedInputs.of(micro, micro.tokens["policy_mask"], model.device)
        log_probs, _ = model.forward(inputs, 1.0)
        loss = -weighted_sum(log_probs, TargetColumns(micro, inputs)["loss_weights"])
        model.backward(loss)
        losses.append(loss.detach())
    loss_value = float(all_reduced(torch.stack(losses).sum(), model.device))
    return loss_value, model.step(is_finite=bool(np.isfinite(loss_value)))


def build_model(config: SftConfig, lm: Any, device: torch.device) -> FsdpModel:
    options = FsdpOptions(
        compute_dtype=resolve_dtype(config.compute_dtype, device),
        num_updates=config.steps,
        optim=OptimConfig(
            lr=config.lr,
            lr_warmup_steps_ratio=min(config.warmup_steps, config.steps) / config.steps,
            weight_decay=config.weight_decay,
        ),
        betas=(0.9, 0.95),
        grad_clip=config.grad_clip,
        decay=SCHEDULES[config.schedule],
    )
    if config.gradient_checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    if config.adapter_path:
        proceed = imported("verl.ext.lora.model:continued_policy")
        continued: FsdpModel = proceed(lm, config, device, options, Path(config.adapter_path))
        return continued
    if config.has_adapter:
        build = imported("verl.ext.lora.model:adapted_policy")
        adapted: FsdpModel = build(lm, config, device, options)
        return adapted
    return FsdpModel(LogProbModel(lm), blocks(lm, lm), device, options)


def save(config: SftConfig, model: FsdpModel, model_config: Any, part: Path | None) -> None:
    """Write the Hugging Face folder: all ranks send shards, rank 0 (which has `part`) writes."""
    if config.has_adapter:
        folder = None if part is None else part / "adapter"
        imported("verl.ext.lora.model:write_adapter")(model, folder)
        if folder is not None:
            imported("verl.ext.lora.base:write_base")(folder, config.model_path)
    named = model.policy_weights(config.save_dtype)
    if part is None:
        deque(named, maxlen=0)
    else:
        write_weights(part, named, model_config, config.save_dtype)
        copy_tokenizer(config.model_path, part)
        copy_settings(Path(config.model_path).expanduser(), part)
    dist.barrier()


def train(config: SftConfig) -> list[float]:
    """Run the training, from a checkpoint if there is one; return the losses of these steps.

    The output folder is locked throughout.
    """
    set_trust(config.trust_remote_code)
    if os.environ.get("RANK", "0") != "0":
        return _train(config, None)
    with whole_folder(Path(config.output_dir), "output_dir") as part:
        return _train(config, part)


def _train(config: SftConfig, part: Path | None) -> list[float]:
    if Path(config.model_path).expanduser().exists():
        check_family(check_model("model_path", config.model_path), "model_path")
        if config.adapter_path:
            start, base = Path(config.adapter_path), Path(config.model_path)
            check_base = imported("verl.ext.lora.base:check_base")
            check_base(f"adapter_path={start}", start, base, "")
    else:  # a hub name: its weights are downloaded later
        with model_errors(config.model_path, "config.json", "model_path"):
            described, _ = PretrainedConfig.get_config_dict(config.model_path)
        check_unquantized("model_path", config.model_path, described)
    checkpoints = Checkpoints(config, is_first=part is not None)
    device = join_ranks(config)
    # On CPU the allocator would otherwise request new pages for the activations of each step.
    try:
        with keep_freed_memory() if device.type == "cpu" else contextlib.nullcontext():
            return _train_on(config, part, device, checkpoints)
    finally:
        dist.destroy_process_group()


def _train_on(
    config: SftConfig, part: Path | None, device: torch.device, checkpoints: Checkpoints
) -> list[float]:
    tokenizer = load_tokenizer(config.model_path, "model_path", config.chat_template_kwargs)
    data = TokenBatch.from_trajectories(
        load_demonstrations(config.train_file, tokenizer, config.max_length, config.end_of_turn)
    )
    torch.manual_seed(config.seed)
    base_dtype = resolve_dtype(config.compute_dtype, device)
    lm = load_causal_lm(config.model_path, base_dtype if config.has_adapter else torch.float32)
    check_family(lm.config, "model_path")  # of a hub model, which is downloaded now
    model = build_model(config, lm, device)
    losses, done = [], checkpoints.resume(model)
    stream = batches(data, config.batch_size, config.steps, config.shuffle, config.seed, done)
    is_hidden = dist.get_rank() != 0
    with tqdm(stream, "sft", config.steps, unit="step", initial=done, disable=is_hidden) as bar:
        for number, batch in enumerate(bar, done + 1):
            loss, step = train_step(model, batch, config.max_tokens_per_micro_batch)
            if step.is_faulty and not is_hidden:
                logger.warning("update skipped: loss %s on rows %s", loss, batch.columns["group"])
            losses.append(loss)
            bar.set_postfix(loss=f"{loss:.3f}", lr=f"{step.lr:.1e}")
            checkpoints.save(number, model, lm.config)
    save(config, model, lm.config, part)
    return losses
