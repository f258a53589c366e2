"""Reads `reward_model.scores` and `reward_model.judge` of a run, two mappings, into dataclasses."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from search_r1.rewards.interface import RewardScores
from search_r1.rewards.judge.judge_options import JudgeOptions, read_key
from verl.bounds import Bounds
from verl.config.reward import RewardConfig, StageConfig
from verl.errors import ConfigError, did_you_mean, explain

OF_F1, OF_COST = ("no_search", "no_answer"), ("correct_answer", "search_penalty", "invalid_format")
OF_FORMAT = ("structure_format_score", "final_format_score", "retrieval_score")
FORM_REWARDS = frozenset({"em_format", "r1_searcher_stage_1", "r1_searcher_stage_2"})
"""Rewards that ask whether a dialogue is valid."""
SCORES: Mapping[str, str] = {
    "format_score": "em", **dict.fromkeys(OF_FORMAT, "em_format"), **dict.fromkeys(OF_F1, "f1"),
    **dict.fromkeys((*OF_COST, "penalise_correct_only"), "em_cost"),
}  # fmt: skip
"""The reward that uses each partial score."""
AT_MOST_ONE, AT_MOST_1000, POSITIVE = Bounds(le=1), Bounds(le=1000), Bounds(gt=0)
BOUNDS: Mapping[str, Bounds] = {
    **dict.fromkeys(("format_score", *OF_FORMAT), AT_MOST_ONE),
    **dict.fromkeys((*OF_COST, *OF_F1), AT_MOST_1000),
    **dict.fromkeys(("timeout", "max_concurrency", "max_tokens"), POSITIVE),
}
"""Bounds of the numbers of both mappings; `RewardScores` refuses negative ones."""
JUDGE = ("url", "model", "api_key_env", "verdict", "prompt", "timeout", "max_concurrency",
         "max_tokens", "body", "cache_path")  # fmt: skip
PLACEHOLDERS = ("{question}", "{accepted}", "{answer}")
HTTP = ("http://", "https://")


def read_scores(given: Mapping[str, Any], used: Collection[str]) -> RewardScores:
    """Read the partial scores of the rewards `used`. Raises ValueError for any other score."""
    _check(given, "scores", SCORES, RewardScores())
    for name, value in given.items():
        if SCORES[name] not in used and value != getattr(RewardScores, name):
            expected = f"nothing: the reward {SCORES[name]} uses it, which this run does not"
            fix = f"reward_model.name={SCORES[name]}, or leave it out"
            raise ValueError(explain(f"scores.{name}", value, expected, fix))
    return RewardScores(**given)


def reward_names(rewards: RewardConfig) -> set[str]:
    """Return the names of all rewards that a run uses, in any stage."""
    sections: Sequence[RewardConfig | StageConfig] = rewards.stages or [rewards]
    return {name for section in sections for name in (section.weights or [section.name])}


def refuse_form_rewards(rewards: RewardConfig) -> None:
    """Raise ConfigError for a reward that looks for tags around tools' results."""
    for name in sorted(reward_names(rewards) & FORM_REWARDS):
        got = f"{name}, and a chat template that does not enclose the results of tools in tags"
        fix = "template=search_r1, or a reward of the answer alone, such as reward_model.name=em"
        raise ConfigError(explain("reward_model.name", got, "tags", fix))


def check_judge(given: Mapping[str, Any]) -> None:
    """Raise ValueError for a setting that no judge can have, whether or not a run uses one."""
    defaults = JudgeOptions()
    _check(given, "judge", JUDGE, defaults)
    settings = {**vars(defaults), **given}
    prompt, verdict = settings["prompt"], settings["verdict"]
    missing = [word for word in PLACEHOLDERS if prompt is not None and word not in prompt]
    _refuse_first(
        (verdict not in ("yes_no", "score"), "verdict", verdict, "yes_no or score",
         "leave it out"),
        (missing, "prompt", f"no {', '.join(missing)}", f"a text with {', '.join(PLACEHOLDERS)}",
         "add them, or leave it out"),
    )  # fmt: skip


def read_judge(given: Mapping[str, Any], default_cache: Path) -> JudgeOptions:
    """Read the judge's options, and its key from the environment. Raises ValueError."""
    check_judge(given)
    settings = {"cache_path": str(default_cache), **given}
    if settings["cache_path"] is not None:
        settings["cache_path"] = str(Path(settings["cache_path"]).expanduser())
    key = read_key(settings.pop("api_key_env", None), "judge.api_key_env")
    judge = JudgeOptions(**settings, api_key=key)
    _refuse_first(
        (not judge.url.startswith(HTTP), "url", judge.url or "nothing",
         "the http address of an OpenAI-compatible endpoint, for llm_judge",
         "reward_model.judge.url=http://127.0.0.1:8001/v1"),
        (not judge.model, "model", "nothing", "the name of a model at the endpoint",
         "reward_model.judge.model=NAME"),
    )  # fmt: skip
    return judge


def _refuse_first(*rules: tuple[object, str, object, str, str]) -> None:
    """Raise ValueError for the first broken rule: is it broken, setting, got, expected, fix."""
    for is_wrong, name, got, expected, fix in rules:
        if is_wrong:
            raise ValueError(explain(f"judge.{name}", got, expected, fix))


def _check(
    given: Mapping[str, Any], section: str, names: Collection[str], defaults: object
) -> None:
    """Raise ValueError for a key that is not in `names`, and a value of another type or size."""
    for name, value in given.items():
        if name not in names:
            expected, fix = f"one of {', '.join(names)}", did_you_mean(name, names, "leave it out")
            raise ValueError(explain(f"{section}.{name}", repr(value), expected, fix))
        default = getattr(defaults, name, None)
        if not _fits(value, default):
            expected = f"a value such as {default!r}" if default is not None else "a text"
            raise ValueError(explain(f"{section}.{name}", repr(value), expected, "correct it"))
        if name in BOUNDS and value not in BOUNDS[name]:
            bounds, fix = BOUNDS[name].expected(value), f"{section}.{name}={default}, the default"
            raise ValueError(explain(f"{section}.{name}", value, bounds, fix))


def _fits(value: Any, default: Any) -> bool:
    """Whether a value is of the default's type; any number may stand for a fraction."""
    if default is None:
        return value is None or isinstance(value, str)
    if isinstance(default, Mapping):
        return isinstance(value, Mapping)
    kinds = int | float if isinstance(default, float) else type(default)
    return isinstance(value, kinds) and isinstance(value, bool) is isinstance(default, bool)
