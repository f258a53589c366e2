"""How a trajectory is scored: a rule, a judge, a sum of them, or one after another."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class JudgeConfig:
    """The language model that `llm_judge` asks, behind an OpenAI-compatible endpoint."""

    url: str | None = None
    """Base address, for example http://127.0.0.1:8001/v1; /chat/completions is added."""
    model: str | None = None
    """Name of the model there."""
    api_key_env: str | None = None
    """Environment variable that holds the key, if the endpoint wants one."""
    verdict: str = "yes_no"
    """What the judge must reply: yes_no, or score (a number from 0 to 1)."""
    prompt: str | None = None
    """Your own wording, with {question}, {accepted} and {answer}, which are put in as JSON."""
    timeout: float = 60.0
    """Seconds that one request may wait to connect, and for each part of its answer."""
    max_retries: int = 3
    """Further tries, with growing pauses, after a failure or a reply that is no verdict."""
    max_concurrency: int = 32
    """Requests at a time."""
    max_tokens: int = 16
    """Tokens of a reply; a model that thinks before it replies needs hundreds."""
    max_answer_chars: int = 500
    """The answer is shown to the judge up to here."""
    cache_path: str | None = "${trainer.default_local_dir}/judge.sqlite"
    """Where verdicts are kept; runs may share a file. null keeps none."""


@dataclass
class PlateauConfig:
    """The end of a stage by a metric that stopped rising."""

    metric: str = "critic/score/mean"
    """A metric of the step, or of validation (val/em) where that is due; higher is better."""
    patience: int = 10
    """Values of the metric without a new best one after which the stage is over."""
    min_delta: float = 0.0
    """How much higher than the best a value must be to be a new one."""


@dataclass
class StageConfig:
    """One stage of a reward that changes during the run."""

    name: str = "em"
    """The reward, as in `reward_model.name`."""
    weights: dict[str, float] = field(default_factory=dict)
    """A weighted sum in place of `name`, as in `reward_model.weights`."""
    until_step: int | None = None
    """The last step of the stage."""
    plateau: PlateauConfig | None = None
    """Ends the stage earlier, or at all."""


@dataclass
class RewardConfig:
    """The rule that scores a trajectory."""

    name: str = "em"
    """A row of `search_r1.rewards.REWARDS`, or your own `path/to/file.py:function`."""
    weights: dict[str, float] = field(default_factory=dict)
    """Weights of several rewards by name (`{em: 1.0, f1: 0.5}`), in place of `name`."""
    stages: list[StageConfig] = field(default_factory=list)
    """Rewards one after another (`[{name: r1_searcher_stage_1, until_step: 100}, {name:
    r1_searcher_stage_2}]`), in place of `name`; each but the last needs an end."""
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    format_score: float = 0.0
    """em: score of a wrong but well-formed answer."""
    structure_format_score: float = 0.0
    """em_format: score of a valid dialogue structure."""
    final_format_score: float = 0.0
    """em_format: score of a present answer in an invalid structure."""
    retrieval_score: float = 0.0
    """em_format: extra score when a retrieved document holds the answer."""
    correct_answer: float = 1.0
    """em_cost: score of a correct answer."""
    search_penalty: float = 0.0
    """em_cost: what each search costs."""
    invalid_format: float = 0.0
    """em_cost: what each turn without an action costs."""
    penalise_correct_only: bool = False
    """em_cost: take costs off correct answers alone."""
