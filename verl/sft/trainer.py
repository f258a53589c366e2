"""Supervised fine-tuning on demonstrations: `python -m verl.sft.trainer key=value …`.

Uses the FSDP model, masks and packing of the RL trainer, so that only policy tokens are trained on.
Runs in one process, or on several ranks under `torchrun`.
"""

import contextlib
import difflib
import functools
import logging
import os
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import yaml
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from tqdm import tqdm

from verl.bounds import MAX_SEED
from verl.config import AdapterConfig, OptimConfig
from verl.config.known import expand_home, limit_problems, raise_problems
from verl.config.option import option
from verl.config.overrides import short_repr
from verl.core_algos.losses import loss_weights, weighted_sum
from verl.errors import ConfigError, explain
from verl.logs import exit_status, start_logging
from verl.model_files import check_model, load_tokenizer
from verl.packing import split_by_work
from verl.ports import free_port
from verl.remote_code import set_trust
from verl.sft.demonstrations import load_demonstrations
from verl.steady import keep_freed_memory
from verl.training.actor import TargetColumns
from verl.training.devices import (
    DTYPES,
    join_process_group,
    resolve_device,
    resolve_dtype,
    share_threads,
)
from verl.training.fsdp import SCHEDULES, FsdpModel, FsdpOptions, StepResult, all_reduced
from verl.training.lora import Role, build_adapted_model, policy_adapter, policy_weights
from verl.training.models import LogProbModel, PackedInputs, blocks, load_causal_lm
from verl.training.weights import copy_tokenizer, whole_folder, write_weights
from verl.types import TokenBatch

logger = logging.getLogger(__name__)

MALFORMED = (OmegaConfBaseException, yaml.YAMLError, ValueError, IndexError, RecursionError)
"""Errors that parsing a command-line argument as YAML may raise."""

bounded = functools.partial(option, resume="free")  # SFT runs are never resumed


@dataclass
class SftConfig(AdapterConfig):
    """Options of a supervised fine-tuning run, of all weights or of an adapter."""

    model_path: str = MISSING
    """Folder (or hub name) of the model to start from."""
    trust_remote_code: bool = False
    """Run code that comes with the model. It runs with your permissions."""
    train_file: str = MISSING
    """Demonstrations: jsonl file, one JSON object per line."""
    output_dir: str = MISSING
    """Hugging Face folder to write, atomically. An adapter is merged, and saved in `adapter/`."""
    steps: int = bounded(20, ge=1)
    """Optimizer steps."""
    batch_size: int = bounded(8, ge=1)
    """Demonstrations per step, over all ranks."""
    lr: float = bounded(2e-4, gt=0, le=1)
    """Peak learning rate."""
    schedule: str = bounded("linear", choices=SCHEDULES)
    """Learning rate after the warm-up: constant, or linear or cosine decay to 0."""
    warmup_steps: int = bounded(3, ge=0)
    """Steps over which lr rises linearly."""
    weight_decay: float = bounded(0.0, ge=0, le=10)
    """Decoupled weight decay."""
    grad_clip: float = bounded(1.0, gt=0)
    """Maximum gradient norm."""
    max_length: int = bounded(2048, ge=1)
    """Maximum tokens of a demonstration; longer ones are refused."""
    max_tokens_per_micro_batch: int = bounded(8192, ge=1)
    """Token budget of one packed forward pass on one rank."""
    gradient_checkpointing: bool = False
    """Recompute block activations in backward."""
    end_of_turn: str = ""
    """Text to append to the last policy segment, such as <|im_end|>; rollouts stop at tags."""
    shuffle: bool = True
    """Shuffle every epoch by `seed`; false keeps file order, from batch seed · steps on."""
    seed: int = bounded(0, ge=0, le=MAX_SEED)
    """Seed of the data order."""
    device: str = bounded("auto", choices=("auto", "cuda", "cpu"))
    """Device: auto, cuda or cpu."""
    compute_dtype: str = bounded("auto", choices=("auto", *DTYPES))
    """Compute dtype: auto, bfloat16, float16 or float32; master weights are float32."""
    save_dtype: str = bounded("bfloat16", choices=tuple(DTYPES))
    """Number format of the saved weights: bfloat16, float16 or float32."""


def parse(arguments: Sequence[str]) -> SftConfig:
    """Parse `key=value` arguments. Raises ConfigError, which suggests a known key."""
    known = [field.name for field in fields(SftConfig)]
    try:
        options = OmegaConf.from_dotlist([argument.removeprefix("+") for argument in arguments])
        for key in options:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, 1) or known
                fix = f"did you mean {near[0]}?"
                raise ConfigError(explain("option", key, "a known option", fix))
        merged = OmegaConf.merge(OmegaConf.structured(SftConfig), options)
        for key in sorted(OmegaConf.missing_keys(merged)):
            raise ConfigError(explain(key, "nothing", "a path", f"give {key}=PATH"))
        config = OmegaConf.to_object(merged)
    except MALFORMED as error:
        got = short_repr(" ".join(str(error).split()))
        raise ConfigError(explain("options", got, "key=value", "see SftConfig")) from error
    assert isinstance(config, SftConfig)
    expand_home(config)
    raise_problems(limit_problems(config))
    names = config.target_modules
    if not isinstance(names, str) and not (
        isinstance(names, list) and all(isinstance(name, str) for name in names)
    ):
        fix = "target_modules=all-linear"
        raise ConfigError(explain("target_modules", names, "a text, or a list of texts", fix))
    return config


def join_ranks(config: SftConfig) -> torch.device:
    """Join torchrun's process group, or create one of this process alone. Returns the device."""
    if "RANK" not in os.environ:
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        os.environ |= {**alone, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    if torch.cuda.is_available() and config.device != "cpu":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = resolve_device(config.device)
    if device.type == "cpu":
        share_threads(int(os.environ["LOCAL_WORLD_SIZE"]))
    join_process_group(device, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    return device


def batches(
    data: TokenBatch, size: int, steps: int, shuffle: bool, seed: int
) -> Iterator[TokenBatch]:
    """Yield `steps` batches of `size` sequences across epochs, with token-mean loss weights."""
    rng = np.random.default_rng(seed)
    order: list[int] = [] if shuffle else list(range(seed * steps * size % len(data), len(data)))
    for _ in range(steps):
        while len(order) < size:
            order += (rng.permutation(len(data)) if shuffle else np.arange(len(data))).tolist()
        batch, order = data.select(order[:size]), order[size:]
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
            betas=(0.9, 0.95),
        ),
        grad_clip=config.grad_clip,
        schedule=config.schedule,
    )
    if config.gradient_checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    if config.has_adapter:
        return build_adapted_model(lm, {Role.ACTOR: config}, device, options)
    return FsdpModel(LogProbModel(lm), blocks(lm, lm), device, options)


def save(config: SftConfig, model: FsdpModel, model_config: Any, part: Path | None) -> None:
    """Write the Hugging Face folder: all ranks send shards, rank 0 (which has `part`) writes."""
    adapter = policy_adapter(model) if config.has_adapter else None
    named = policy_weights(model, config.save_dtype)
    if part is None:
        deque(named, maxlen=0)
    else:
        write_weights(part, named, model_config, config.save_dtype)
        copy_tokenizer(config.model_path, part)
        if adapter is not None:
            adapter.write(part / "adapter")
    dist.barrier()


def train(config: SftConfig) -> list[float]:
    """Run the training and return the loss of each step. The output folder is locked throughout."""
    set_trust(config.trust_remote_code)
    if os.environ.get("RANK", "0") != "0":
        return _train(config, None)
    with whole_folder(Path(config.output_dir), "output_dir") as part:
        return _train(config, part)


def _train(config: SftConfig, part: Path | None) -> list[float]:
    if Path(config.model_path).expanduser().exists():  # else a hub name, which is downloaded later
        check_model("model_path", config.model_path)
    device = join_ranks(config)
    # On CPU the allocator would otherwise request new pages for the activations of each step.
    with keep_freed_memory() if device.type == "cpu" else contextlib.nullcontext():
        return _train_on(config, part, device)


def _train_on(config: SftConfig, part: Path | None, device: torch.device) -> list[float]:
    tokenizer = load_tokenizer(config.model_path, "model_path")
    data = TokenBatch.from_trajectories(
        load_demonstrations(config.train_file, tokenizer, config.max_length, config.end_of_turn)
    )
    torch.manual_seed(config.seed)
    base_dtype = resolve_dtype(config.compute_dtype, device)
    lm = load_causal_lm(config.model_path, base_dtype if config.has_adapter else torch.float32)
    model = build_model(config, lm, device)
    losses = []
    stream = batches(data, config.batch_size, config.steps, config.shuffle, config.seed)
    is_hidden = dist.get_rank() != 0
    with tqdm(stream, total=config.steps, desc="sft", unit="step", disable=is_hidden) as bar:
        for batch in bar:
            loss, step = train_step(model, batch, config.max_tokens_per_micro_batch)
            if step.is_faulty:
                logger.warning("update skipped: loss %s on rows %s", loss, batch.columns["group"])
            losses.append(loss)
            bar.set_postfix(loss=f"{loss:.3f}", lr=f"{step.lr:.1e}")
    save(config, model, lm.config, part)
    dist.destroy_process_group()
    return losses


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""

    def work() -> None:
        train(parse(sys.argv[1:] if arguments is None else arguments))

    start_logging(logging.INFO)
    status = exit_status(work, "stopped; nothing was written")
    if status == 0 and "TORCHELASTIC_RUN_ID" in os.environ:
        # Threads of gloo may still release tensors, which aborts a rank whose interpreter is
        # shutting down; torchrun would then report a failed run.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    return status


if __name__ == "__main__":
    sys.exit(main())
