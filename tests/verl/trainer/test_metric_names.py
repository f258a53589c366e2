"""Options that name a metric are checked before a run."""

import re

import pytest

from search_r1.scoring import build_reward_manager
from tests.verl.trainer.documented import PAGE, undocumented
from verl.config import Config
from verl.config.reward import PlateauConfig, RewardConfig, StageConfig
from verl.errors import ConfigError, PluginError
from verl.rewards.interface import EachAlone, Reward, RewardManager
from verl.trainer.metric_names import (
    OPEN_GROUPS,
    STEP_NAMES,
    check_measured,
    check_metric_names,
)

OWN = EachAlone(lambda trajectory: Reward(0.0))


def config_of(best: str = "val/score", plateau: str = "", **reward: object) -> Config:
    config = Config()
    config.trainer.best_metric = best
    config.reward_model = RewardConfig(**reward)  # type: ignore[arg-type]
    if plateau:
        first = StageConfig("em_format", plateau=PlateauConfig(plateau))
        config.reward_model.stages = [first, StageConfig(weights={"f1": 1.0, "em": 1.0})]
    return config


def check(config: Config, reward: RewardManager | None = None) -> None:
    check_metric_names(config, reward or build_reward_manager(config), {"nq", "hotpotqa"})


@pytest.mark.parametrize(
    ("name", "reward"),
    [
        ("val/score", "em"), ("val/em", "em"), ("val/nq/em", "f1"), ("val/hotpotqa/score", "f1"),
        ("val/f1", "f1"), ("val/format_valid", "em_format"), ("val/num_rows", "em"),
        ("val/env/searches", "em"), ("val/nq/env/turns", "em"), ("val/fault/x", "em"),
    ],
)  # fmt: skip
def test_metrics_of_the_reward_and_the_data_are_known(name: str, reward: str) -> None:
    """Components, for all rows and for each data source; counts of the agent."""
    check(config_of(name, name=reward))


@pytest.mark.parametrize(
    ("name", "reward", "near"),
    [
        ("val/nonsense", "em", None), ("val/emm", "em", "val/em"), ("val/f1", "em", None),
        ("val/retrieval_hits", "em_format", "val/retrieval_hit"), ("val/", "em", None),
        ("val/triviaqa/em", "em", None), ("val/NQ/em", "em", None),
        ("val/searches", "em_cost", None),
    ],
)  # fmt: skip
def test_a_metric_that_nothing_logs_is_refused(name: str, reward: str, near: str | None) -> None:
    """Before ranks start, with the metrics of this run."""
    with pytest.raises(ConfigError, match=f"trainer.best_metric: got {name}") as refused:
        check(config_of(name, name=reward))
    assert near is None or f"did you mean {near}?" in str(refused.value)


@pytest.mark.parametrize(
    ("name", "is_known"),
    [
        ("critic/score/mean", True), ("critic/scores/mean", False), ("val/em", True),
        ("val/f1_score", True), ("reward/f1", True), ("reward/judge", False), ("em", False),
        ("reward/format_valid", True), ("env/searches", True), ("response_length/mean", True),
        ("response_length", False), ("actor/entropy", True), ("train/loss", False),
    ],
)  # fmt: skip
def test_the_metric_of_a_plateau_is_checked_as_well(name: str, is_known: bool) -> None:
    """Components of every stage are known, also those of a weighted sum."""
    config = config_of(plateau=name)
    if is_known:
        check(config)
        return
    with pytest.raises(ConfigError, match=r"stages\[0\]\.plateau\.metric"):
        check(config)


def test_components_of_an_own_reward_are_checked_when_it_has_scored() -> None:
    """Its names are not known before; the first validation names what it measured."""
    for name in ("val/mine", "val/nq/mine"):
        check(config_of(name), OWN)
    check(config_of(plateau="reward/mine"), OWN)
    with pytest.raises(ConfigError, match="plateau"):
        check(config_of(plateau="critic/mine"), OWN)
    check_measured("val/mine", {"val/mine": 1.0})
    with pytest.raises(PluginError, match=r"got val/min,.*did you mean val/mine"):
        check_measured("val/min", {"val/mine": 1.0, "val/score": 0.0})


def test_a_run_without_validation_has_no_best_metric() -> None:
    """What is never read is not checked."""
    config = config_of("val/nonsense")
    config.trainer.test_freq = 0
    check(config)


def test_names_agree_with_the_page_of_metrics() -> None:
    """Every fixed name is documented, and every documented metric of a step is known."""
    assert undocumented(STEP_NAMES) == []
    listed = re.findall(r"`((?:\w+/)+\w+)`", PAGE.read_text())
    groups = {name.partition("/")[0] for name in listed if not re.search("[A-Z]", name)}
    others = {"val", "verl", "docs", "tests", "search_r1"}
    fixed = {name.partition("/")[0] for name in STEP_NAMES}
    assert groups - others <= {*OPEN_GROUPS, *fixed, "reward"}
    for name in listed:
        is_fixed = name.startswith(("critic/", "response_length/", "prompt_length/"))
        if is_fixed and not re.search("[A-Z]", name):
            assert name in STEP_NAMES, name
