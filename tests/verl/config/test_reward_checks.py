"""Rules between the options of rewards."""

import pytest

from tests.verl.config.test_cli import compose
from verl.errors import ConfigError


def stages(text: str) -> str:
    return f"reward_model.stages=[{text}]"


def test_stages_become_dataclasses() -> None:
    """Stages given on the command line get the defaults of their fields."""
    first, last = compose(
        stages("{name: a, until_step: 5, plateau: {metric: val/em}}, {weights: {f1: 0.5}}"),
        "trainer.test_freq=5",
    ).reward_model.stages
    assert (first.name, first.until_step) == ("a", 5)
    assert first.plateau is not None and first.plateau.patience == 10
    assert (last.weights, last.plateau) == ({"f1": 0.5}, None)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((stages("{name: a}, {name: b}"),), "stage 1 of reward_model.stages: got no end"),
        ((stages("{name: a, until_step: 5}"),), "stage 1 of reward_model.stages: got an end"),
        (
            (stages("{until_step: 5}, {until_step: 5}, {name: a}"),),
            r"until_step \[5, 5\], expected rising numbers above 0",
        ),
        ((stages("{name: a}"), "reward_model.weights={f1: 1.0}"), "leave one of them out"),
        (("reward_model.name=f1", stages("{name: em}")), r"reward_model\.name: got f1"),
        (("reward_model.name=f1", "reward_model.weights={em: 1.0}"), r"weights=\{\}"),
        ((stages("{plateau: {patience: 0}}, {name: a}"),), r"plateau\.patience: got 0"),
        ((stages("{plateau: {min_delta: -1}}, {name: a}"),), r"plateau\.min_delta: got -1"),
        ((stages("{plateau: {metric: val/em}}, {name: a}"),), "trainer.test_freq=10"),
    ],
)
def test_invalid_reward_options_are_refused(arguments: tuple[str, ...], expected: str) -> None:
    """The error names the problem and the fix."""
    with pytest.raises(ConfigError, match=expected) as caught:
        compose(*arguments)
    assert "fix:" in str(caught.value)


@pytest.mark.parametrize("metric", ["val/score", "val/nq/score"])
def test_scores_of_several_stages_do_not_rank_checkpoints(metric: str) -> None:
    """The best of the first stage would be kept for ever, and those of the last one deleted."""
    two = stages("{name: r1_searcher_stage_1, until_step: 5}, {name: r1_searcher_stage_2}")
    ranking = (two, "trainer.keep_last=1", "trainer.test_freq=5", f"trainer.best_metric={metric}")
    with pytest.raises(ConfigError, match="best_metric=val/em"):
        compose(*ranking)
    for change in ("keep_last=null", "keep_best=0", "test_freq=-1", "best_metric=val/em"):
        assert len(compose(*ranking, f"trainer.{change}").reward_model.stages) == 2
