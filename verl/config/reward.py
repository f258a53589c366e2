"""Options of the reward: a rule, a judge, a weighted sum, or stages that follow each other."""

from dataclasses import dataclass, field
from typing import Any

from verl.config.option import option


@dataclass
class JudgeConfig:
    """The language model behind `llm_judge`, at an OpenAI-compatible endpoint."""

    url: str | None = option(None, resume="free")
    """Base URL, for example http://127.0.0.1:8001/v1; /chat/completions is appended."""
    model: str | None = option(None, resume="logged")
    """Name of the model at the endpoint."""
    api_key_env: str | None = option(None, resume="free")
    """Environment variable that holds the API key, if the endpoint requires one."""
    verdict: str = option("yes_no", resume="logged", choices=("yes_no", "score"))
    """Reply that the judge must give: yes_no, or score (a number from 0 to 1)."""
    prompt: str | None = option(None, resume="logged")
    """Custom prompt with {question}, {accepted} and {answer}, inserted as JSON; null: built-in."""
    timeout: float = option(60.0, resume="logged", gt=0)
    """Seconds that the judge may take to connect, and for each part of its response."""
    max_concurrency: int = option(32, resume="logged", ge=1)
    """Maximum concurrent requests."""
    max_tokens: int = option(16, resume="logged", ge=1)
    """Maximum tokens of a reply; a model that thinks before it replies needs hundreds."""
    body: dict[str, Any] = option(factory=dict, resume="logged")
    """Fields of the request that replace ours, or are added; null removes a field
    (`{max_tokens: null, max_completion_tokens: 2000, temperature: null}`)."""
    cache_path: str | None = option("${trainer.default_local_dir}/judge.sqlite", resume="free")
    """SQLite file that caches verdicts; several runs may share it. null disables the cache."""


@dataclass
class PlateauConfig:
    """End of a stage when a metric stops rising."""

    metric: str = option("critic/score/mean", resume="experiment")
    """Metric of the training step or of a validation (val/em); higher is better."""
    patience: int = option(10, resume="experiment", ge=1)
    """Number of consecutive values without a new best after which the stage ends."""
    min_delta: float = option(0.0, resume="experiment", ge=0)
    """Minimum increase over the best value that counts as a new best."""


@dataclass
class StageConfig:
    """One stage of a reward that changes during the run."""

    name: str = option("em", resume="experiment")
    """Reward of the stage, as in `reward_model.name`."""
    weights: dict[str, float] = option(factory=dict, resume="experiment", ge=-1000, le=1000)
    """Weighted sum of rewards instead of `name`, as in `reward_model.weights`."""
    until_step: int | None = option(None, resume="experiment", ge=1)
    """Last step of the stage; null ends it by `plateau`, or never for the last stage."""
    plateau: PlateauConfig | None = option(None, resume="experiment")
    """Ends the stage when a metric stops rising, even before `until_step`."""


@dataclass
class RewardConfig:
    """The reward of a trajectory."""

    name: str = option("em", resume="experiment")
    """A reward of docs/guides/rewards.md, or a custom `path/to/file.py:function`."""
    weights: dict[str, float] = option(factory=dict, resume="experiment", ge=-1000, le=1000)
    """Weighted sum of rewards (`{em: 1.0, f1: 0.5}`) instead of `name`."""
    stages: list[StageConfig] = option(factory=list, resume="experiment")
    """Rewards that follow each other (`[{name: em_format, until_step: 100}, {name: em}]`) instead
    of `name`; every stage but the last needs an end."""
    normalize: str = option("squad", resume="experiment", choices=("squad", "unicode"))
    """Rule by which answers are compared: squad, the published one (ASCII punctuation), or unicode,
    which also ignores Unicode's punctuation, invisible characters and forms of the same letter."""
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    format_score: float = option(0.0, resume="logged", ge=0, le=1)
    """em: score of a wrong but well-formed answer."""
    structure_format_score: float = option(0.0, resume="logged", ge=0, le=1)
    """em_format: score of a wrong answer, or none, in a valid dialogue structure; taken off the
    score of a correct answer in an invalid structure."""
    final_format_score: float = option(0.0, resume="logged", ge=0, le=1)
    """em_format: score of a wrong answer in an invalid structure."""
    retrieval_score: float = option(0.0, resume="logged", ge=0, le=1)
    """em_format: added to `structure_format_score` if a document contains an accepted answer."""
    correct_answer: float = option(1.0, resume="logged", ge=0, le=1000)
    """em_cost: score of a correct answer."""
    search_penalty: float = option(0.0, resume="logged", le=1000)
    """em_cost: cost of each query, 0 or more; subtracted from the score."""
    invalid_format: float = option(0.0, resume="logged", le=1000)
    """em_cost: cost of each turn without a valid action, 0 or more; subtracted from the score."""
    penalise_correct_only: bool = option(False, resume="logged")
    """em_cost: subtract costs from correct answers only."""
