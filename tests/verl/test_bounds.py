"""Numeric options of every command line refuse impossible values."""

import dataclasses
import importlib
import math
import typing
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import search_r1
from search_r1.options import problems
from verl.bounds import FINITE, MAX_NUMBER, MAX_SEED, Bounds
from verl.config import Config, RewardConfig
from verl.config.known import settings
from verl.config.reward import PlateauConfig, StageConfig
from verl.ext.sft.options import SftConfig
from verl.ext.sft.rejection_sampling import Options

IMPOSSIBLE = (math.nan, math.inf, -math.inf, 2**63, -(2**63), 1e300, -1e300)
MAY_BE_ZERO = {
    "0 turns the feature off": "lora_rank lr_warmup_steps_ratio weight_decay "
    "entropy_coeff kl_loss_coef kl_coef penalty_factor critic_warmup save_freq keep_best "
    "test_freq min_delta warmup_steps rescore "
    "cache_entries cache_bytes inject_failures inject_hangs test_share "
    "chunk_overlap",
    "full discount, one-step estimates": "gamma lam",
    "greedy; training refuses it by a separate rule": "temperature",
    "never again, or at once": "node_timeout max_restarts max_retries max_outage max_turns "
    "online_retries batch_wait_ms drain max_lost_share",
    "no ratio is too small": "rollout_mask_floor",
    "of either sign": "weights min_score",
    "the first seed; any free port": "seed inject_seed port",
    "alternating; no separate devices": "max_staleness rollout_gpus",
}
MAY_BE_NEGATIVE = {
    "-1 means only at the end of the run": "save_freq test_freq",
    "entropy may also be lowered": "entropy_coeff",
    "of either sign": MAY_BE_ZERO["of either sign"],
}


def is_number(hint: object) -> bool:
    """Whether a type is or contains a number."""
    return hint in (int, float) or any(map(is_number, typing.get_args(hint)))


def training_options() -> Iterator[tuple[str, Callable[[float], bool]]]:
    """Yield each numeric training option with a function that says whether it allows a number."""
    stage = StageConfig(plateau=PlateauConfig())
    whole = Config(reward_model=RewardConfig(stages=[stage]))
    for section in (whole, SftConfig(), Options(rollouts="", out="")):
        for key, owner, field, _ in settings(section):
            if is_number(typing.get_type_hints(type(owner))[field.name]):
                yield f"{type(section).__name__}.{key}", field.metadata["limits"].allows


def command_flags() -> Iterator[tuple[str, Callable[[float], bool]]]:
    """Yield each numeric flag of the search_r1 commands in the same way."""
    root = Path(search_r1.__file__).parent
    for path in sorted(root.rglob("*.py")):
        if "from search_r1.options import" not in path.read_text(encoding="utf-8"):
            continue
        parts = path.relative_to(root.parent).with_suffix("").parts
        module = importlib.import_module(".".join(parts))
        for kind in vars(module).values():
            is_own = getattr(kind, "__module__", "") == module.__name__ and kind.__name__ != "Item"
            if is_own and dataclasses.is_dataclass(kind):  # Item is a row of a table
                yield from flags_of(kind)


def flags_of(kind: type) -> Iterator[tuple[str, Callable[[float], bool]]]:
    """Yield the numeric fields of one dataclass of flags in the same way."""
    hints = typing.get_type_hints(kind, include_extras=True)
    for name in (f.name for f in dataclasses.fields(kind) if is_number(hints[f.name])):
        single = dataclasses.make_dataclass("Single", [(name, hints[name])])
        yield f"{kind.__name__}.{name}", lambda value, kind=single: not [*problems(kind(value))]


OPTIONS = dict([*training_options(), *command_flags()])


@pytest.mark.parametrize("key", OPTIONS)
def test_impossible_numbers_are_refused(key: str) -> None:
    """Non-finite and too large numbers are refused; 0 and -1 too, unless listed above."""
    allows, name = OPTIONS[key], key.rpartition(".")[2]
    assert [number for number in IMPOSSIBLE if allows(number)] == []
    for number, reasons in ((0, MAY_BE_ZERO), (-1, MAY_BE_NEGATIVE)):
        assert allows(number) == (name in " ".join(reasons.values()).split()), number


def test_the_error_describes_the_bounds() -> None:
    """Stated bounds are always described, the default limit only for numbers that exceed it."""
    for bounds, number, expected in (
        (Bounds(1), 0, "1 or more"),
        (Bounds(1), 2**31, f"1 or more, a finite number of at most {MAX_NUMBER}"),
        (Bounds(gt=0), math.nan, f"more than 0, a finite number of at most {MAX_NUMBER}"),
        (Bounds(gt=0, le=1), math.inf, "more than 0, at most 1"),
        (Bounds(ge=0, lt=1), math.inf, "0 or more, less than 1"),
        (Bounds(0, MAX_SEED), -1, f"from 0 to {MAX_SEED}"),
        (FINITE, math.nan, f"a finite number of at most {MAX_NUMBER}"),
    ):
        assert number not in bounds
        assert bounds.expected(number) == expected
