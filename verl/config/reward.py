"""How a trajectory is scored: a rule, a judge, a sum of them, or one after another."""

from __future__ import annotations

from dataclasses import dataclass, field

from verl.config.option import option


@dataclass
class JudgeConfig:
    """The language model that `llm_judge` asks, behind an OpenAI-compatible endpoint."""

    url: str | None = option(None, resume="free")
    """Base address, for example http://127.0.0.1:8001/v1; /chat/completions is added."""
    model: str | None = option(None, resume="logged")
    """Name of the model there."""
    api_key_env: str | None = option(None, resume="free")
    """Environment variable that holds the key, if the endpoint wants one."""
    verdict: str = option("yes_no", resume="logged", choices=("yes_no", "score"))
    """What the judge must reply: yes_no, or score (a number from 0 to 1)."""
    prompt: str | None = option(None, resume="logged")
    """Your own wording, with {question}, {accepted} and {answer}, which are put in as JSON."""
    timeout: float = option(60.0, resume="logged", gt=0)
    """Seconds that one request may take, to the last byte of its answer."""
    max_retries: int = option(3, resume="logged", ge=0)
    """Further tries, with growing pauses, after a failure or a reply that is no verdict."""
    max_concurrency: int = option(32, resume="logged", ge=1)
    """Requests at a time."""
    max_tokens: int = option(16, resume="logged", ge=1)
    """Tokens of a reply; a model that thinks before it replies needs hundreds."""
    max_answer_chars: int = option(500, resume="logged", ge=1)
    """The answer is shown to the judge up to here."""
    cache_path: str | None = option("${trainer.default_local_dir}/judge.sqlite", resume="free")
    """Where verdicts are kept; runs may share a file. null keeps none."""


@dataclass
class PlateauConfig:
    """The end of a stage by a metric that stopped rising."""

    metric: str = option("critic/score/mean", resume="experiment")
    """A metric of the step, or of validation (val/em) where that is due; higher is better."""
    patience: int = option(10, resume="experiment", ge=1)
    """Values of the metric without a new best one after which the stage is over."""
    min_delta: float = option(0.0, resume="experiment", ge=0)
    """How much higher than the best a value must be to be a new one."""


@dataclass
class StageConfig:
    """One stage of a reward that changes during the run."""

    name: str = option("em", resume="experiment")
    """The reward, as in `reward_model.name`."""
    weights: dict[str, float] = option(factory=dict, resume="experiment", ge=-1000, le=1000)
    """A weighted sum in place of `name`, as in `reward_model.weights`."""
    until_step: int | None = option(None, resume="experiment", ge=1)
    """The last step of the stage."""
    plateau: PlateauConfig | None = option(None, resume="experiment")
    """Ends the stage earlier, or at all."""


@dataclass
class RewardConfig:
    """The rule that scores a trajectory."""

    name: str = option("em", resume="experiment")
    """A reward of docs/rewards.md, or your own `path/to/file.py:function`."""
    weights: dict[str, float] = option(factory=dict, resume="experiment", ge=-1000, le=1000)
    """Weights of several rewards by name (`{em: 1.0, f1: 0.5}`), in place of `name`."""
    stages: list[StageConfig] = option(factory=list, resume="experiment")
    """Rewards one after another (`[{name: em_format, until_step: 100}, {name: em}]`), in place of
    `name`; each but the last needs an end."""
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    format_score: float = option(0.0, resume="logged", ge=0, le=1)
    """em: score of a wrong but well-formed answer."""
    structure_format_score: float = option(0.0, resume="logged", ge=0, le=1)
    """em_format: score of a valid dialogue structure."""
    final_format_score: float = option(0.0, resume="logged", ge=0, le=1)
    """em_format: score of a present answer in an invalid structure."""
    retrieval_score: float = option(0.0, resume="logged", ge=0, le=1)
    """em_format: extra score when a document that was found holds the answer."""
    correct_answer: float = option(1.0, resume="logged", ge=0, le=1000)
    """em_cost: score of a correct answer."""
    search_penalty: float = option(0.0, resume="logged", le=1000)
    """em_cost: what each query costs, 0 or more; it is taken off the score."""
    invalid_format: float = option(0.0, resume="logged", le=1000)
    """em_cost: what each turn without an action costs, 0 or more; it is taken off the score."""
    penalise_correct_only: bool = option(False, resume="logged")
    """em_cost: take costs off correct answers alone."""
