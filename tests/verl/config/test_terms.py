"""Weights of the update's further terms: names, numbers, and the name that one of them had."""

from typing import Any

import pytest

from verl.config import cli
from verl.config.terms import KEY, TERMS, problems
from verl.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({}, []),
        ({"llds": 0.1, "sibling": 1000}, []),
        ({"siblings": 0.1}, ["siblings"]),
        ({"llds": -0.1, "sibling": True}, ["llds", "sibling"]),
        ({"llds": "much", "sibling": float("nan")}, ["llds", "sibling"]),
    ],
    ids=str,
)
def test_terms_are_known_and_their_weights_numbers(given: dict[str, Any], names: list[str]) -> None:
    """Each bad entry is named, with what is expected there."""
    found = list(problems(given))
    assert [name in text for name, text in zip(names, found, strict=True)] == [True] * len(names)
    assert all(f"{KEY}." in text for text in found)


def test_the_former_option_is_a_term() -> None:
    """`actor.llds_coef` sets the weight of its term."""
    options = ["actor_rollout_ref.model.path=m", "data.train_files=t", "data.val_files=v"]
    config = cli.compose([*options, "actor_rollout_ref.actor.llds_coef=0.1"])
    assert config.actor_rollout_ref.actor.terms == {"llds": 0.1}
    assert set(TERMS) >= config.actor_rollout_ref.actor.terms.keys()


def test_a_group_of_one_has_no_sibling() -> None:
    """Refused before the run, since the term would never apply."""
    options = ["actor_rollout_ref.model.path=m", "data.train_files=t", "data.val_files=v"]
    options += ["actor_rollout_ref.actor.terms={sibling: 0.1}"]
    with pytest.raises(ConfigError, match="n_agent"):
        cli.compose(options)
