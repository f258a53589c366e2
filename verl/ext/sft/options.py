"""Options of supervised fine-tuning, and their command line `key=value …`."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import yaml
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl.bounds import MAX_SEED
from verl.config import AdapterConfig
from verl.config.known import (
    check_limits,
    describe_options,
    expand_home,
    options_help,
)
from verl.config.option import option
from verl.config.overrides import short_repr
from verl.config.policy import DTYPES
from verl.errors import ConfigError, did_you_mean, explain

MALFORMED = (OmegaConfBaseException, yaml.YAMLError, ValueError, IndexError, RecursionError)
"""Errors that parsing a command-line argument as YAML may raise."""

SCHEDULES: Mapping[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
}
"""Factor of the learning rate by the share of the updates after the warm-up that is done."""

bounded = functools.partial(option, resume="fixed")
changeable = functools.partial(option, resume="free")
"""An option that a resumed run may change, or whose file is compared by content."""


@dataclass
class SftConfig(AdapterConfig):
    """Options of a supervised fine-tuning run, of all weights or of an adapter."""

    model_path: str = changeable(MISSING)
    """Folder (or hub name) of the model to start from."""
    adapter_path: str = changeable("")
    """Folder of an adapter of this model to train on; default: a new one, of lora_rank."""
    trust_remote_code: bool = changeable(False)
    """Run code that comes with the model. It runs with your permissions."""
    train_file: str = changeable(MISSING)
    """Demonstrations: jsonl or parquet file, one dialogue per row."""
    output_dir: str = changeable(MISSING)
    """Hugging Face folder to write, atomically. An adapter is merged, and saved in `adapter/`."""
    steps: int = bounded(20, ge=1)
    """Optimizer steps."""
    batch_size: int = bounded(8, ge=1)
    """Demonstrations per step, over all ranks."""
    lr: float = bounded(2e-4, gt=0, le=1)
    """Peak learning rate."""
    schedule: str = bounded("linear", choices=tuple(SCHEDULES))
    """Learning rate after the warm-up: constant, or linear or cosine decay to 0."""
    warmup_steps: int = bounded(3, ge=0)
    """Steps over which lr rises linearly."""
    weight_decay: float = bounded(0.0, ge=0, le=10)
    """Decoupled weight decay."""
    grad_clip: float = bounded(1.0, gt=0)
    """Maximum gradient norm."""
    max_length: int = bounded(2048, ge=1)
    """Maximum tokens of a demonstration; longer ones are refused."""
    max_tokens_per_micro_batch: int = changeable(8192, ge=1)
    """Token budget of one packed forward pass on one rank."""
    gradient_checkpointing: bool = changeable(False)
    """Recompute block activations in backward."""
    chat_template_kwargs: dict[str, Any] = option(resume="fixed", factory=dict)
    """Further arguments of the model's chat template, such as {enable_thinking: false}."""
    end_of_turn: str = bounded("")
    """Text to append to the last policy segment, such as <|im_end|>; rollouts stop at tags."""
    shuffle: bool = bounded(True)
    """Shuffle every epoch by `seed`; false keeps file order, from batch seed · steps on."""
    seed: int = bounded(0, ge=0, le=MAX_SEED)
    """Seed of the data order."""
    device: str = changeable("auto", choices=("auto", "cuda", "cpu"))
    """Device: auto, cuda or cpu."""
    compute_dtype: str = bounded("auto", choices=("auto", "bfloat16", "float32"))
    """Compute dtype: auto, bfloat16 or float32; master weights are float32."""
    save_freq: int = changeable(0, ge=-1)
    """Steps between checkpoints, from which the same command continues; -1: only at the end, 0:
    none."""
    save_dtype: str = changeable("bfloat16", choices=DTYPES)
    """Number format of the saved weights: bfloat16, float16 or float32."""


def parse(arguments: Sequence[str]) -> SftConfig:
    """Parse `key=value` arguments. Raises ConfigError, which suggests a known key."""
    known = [field.name for field in fields(SftConfig)]
    try:
        options = OmegaConf.from_dotlist([argument.removeprefix("+") for argument in arguments])
        for key in options:
            if key not in known:
                fix = did_you_mean(str(key), known, "--help lists them")
                raise ConfigError(explain("option", key, "a known option", fix))
        merged = OmegaConf.merge(OmegaConf.structured(SftConfig), options)
        for key in sorted(OmegaConf.missing_keys(merged)):
            raise ConfigError(explain(key, "nothing", "a path", f"give {key}=PATH"))
        config = OmegaConf.to_object(merged)
    except MALFORMED as error:
        got = short_repr(" ".join(str(error).split()))
        raise ConfigError(
            explain("options", got, "key=value", "--help lists the options")
        ) from error
    assert isinstance(config, SftConfig)
    expand_home(config)
    check_limits(config)
    if config.adapter_path and not config.has_adapter:
        fix = "give the rank of that adapter: lora_rank, lora_alpha"
        raise ConfigError(explain("adapter_path", "lora_rank=0", "the adapter's rank", fix))
    names = config.target_modules
    if not isinstance(names, str) and not (
        isinstance(names, list) and all(isinstance(name, str) for name in names)
    ):
        fix = "target_modules=all-linear"
        raise ConfigError(explain("target_modules", names, "a text, or a list of texts", fix))
    return config


RARE = ("target_modules", "end_of_turn", "shuffle", "device", "compute_dtype", "save_dtype")
"""Options that only `--help-all` shows."""


def help_text(is_whole: bool = True) -> str:
    """Return the text of `--help`: usage, and the options with their defaults and descriptions."""
    usage = "usage: python -m verl.trainer.sft key=value ..."
    about = "Supervised fine-tuning on demonstrations; on several ranks under torchrun."
    known = describe_options(SftConfig())
    shown = [option for key, option in known.items() if is_whole or key not in RARE]
    more = [] if is_whole else ["--help-all lists all options; these are the common ones."]
    return "\n\n".join((usage, about, *more, options_help(shown)))
