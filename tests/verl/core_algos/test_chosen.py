"""Estimators and losses of the user's own, in files, beside the built-in ones."""

from pathlib import Path

import pytest
import torch

from verl.config import cli
from verl.core_algos.advantages import ADVANTAGES, AdvantageInputs
from verl.core_algos.chosen import ESTIMATOR, LOSS, advantage_estimator, policy_loss
from verl.core_algos.policy_losses import POLICY_LOSSES, PolicyLossInputs
from verl.errors import ConfigError, PluginError
from verl.preflight import algorithms

OWN = """
import torch
from verl.core_algos.advantages import AdvantageEstimator, critic_free


def to_go(inputs):
    return inputs.returns_to_go()


def _same(inputs):
    return inputs.per_token(inputs.scores - inputs.scores.mean())


grouped = AdvantageEstimator("x", critic_free("x", _same).compute, needs_groups=True)


def plain(inputs):
    return -inputs.advantages * inputs.ratio


def too_short(inputs):
    return torch.zeros(1)


def fails(inputs):
    raise KeyError("no such column")


def infinite(inputs):
    values = inputs.token_rewards if hasattr(inputs, "token_rewards") else inputs.log_probs
    return values / 0.0


def without_gradient(inputs):
    return inputs.advantages
"""
REQUIRED = ["data.train_files=t.parquet", "data.val_files=v.parquet",
            "actor_rollout_ref.model.path=m", "actor_rollout_ref.rollout.n_agent=2"]  # fmt: skip


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """Return a file with algorithms of a user."""
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path / "own.py"


def inputs() -> AdvantageInputs:
    """Return two trajectories of three and two tokens, of which one token is an observation."""
    rewards = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.5])
    mask = torch.tensor([True, False, True, True, True])
    return AdvantageInputs(rewards, mask, torch.tensor([0, 3, 5]), group_ids=[0, 0])


def test_a_function_of_a_file_gives_what_the_built_in_one_gives(own: Path) -> None:
    """The same formula, written by a user, has the same advantages; observations get 0."""
    found = advantage_estimator(f"{own}:to_go").compute(inputs())
    expected = ADVANTAGES["reinforce"].compute(inputs())
    assert torch.equal(found.advantages, expected.advantages)
    grouped = advantage_estimator(f"{own}:grouped")
    assert grouped.needs_groups and not grouped.needs_critic
    assert grouped.compute(inputs()).advantages.tolist() == [0.25, 0.0, 0.25, -0.25, -0.25]


def test_a_loss_of_a_file_gives_what_the_formula_gives(own: Path) -> None:
    """Losses and their gradient are those of -A ratio."""
    log_probs = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    old, advantages = torch.tensor([-1.5, -2.0]).double(), torch.tensor([1.0, -2.0]).double()
    batch = PolicyLossInputs(log_probs, old, advantages, torch.tensor([0, 0]))
    losses, diagnostics = policy_loss(f"{own}:plain")(batch)
    assert torch.equal(losses, -advantages * (log_probs - old).exp())
    assert not diagnostics.clipped.any()
    assert policy_loss("gspo") is POLICY_LOSSES["gspo"]


@pytest.mark.parametrize("name", ["too_short", "fails"])
def test_faults_of_own_algorithms_are_errors_that_name_the_option(own: Path, name: str) -> None:
    """A wrong shape or an exception ends the run with the option's key."""
    with pytest.raises(PluginError, match=ESTIMATOR):
        advantage_estimator(f"{own}:{name}").compute(inputs())


@pytest.mark.parametrize(
    ("option", "name", "kind"),
    [
        (ESTIMATOR, "too_short", PluginError), (ESTIMATOR, "fails", PluginError),
        (ESTIMATOR, "infinite", ConfigError), (ESTIMATOR, "torch", ConfigError),
        (LOSS, "too_short", PluginError), (LOSS, "infinite", ConfigError),
        (LOSS, "without_gradient", ConfigError),
    ],
)  # fmt: skip
def test_own_algorithms_are_tried_before_a_run(
    own: Path, option: str, name: str, kind: type[Exception]
) -> None:
    """The checks before a run compute a batch of four tokens."""
    if name == "torch":  # refused already when the options are read: it is no function
        with pytest.raises(kind, match=option):
            cli.compose([*REQUIRED, f"{option}={own}:{name}"])
        return
    (problem,) = algorithms.problems(cli.compose([*REQUIRED, f"{option}={own}:{name}"]))
    assert isinstance(problem, kind) and option in str(problem)


def test_what_works_has_no_problems(own: Path) -> None:
    """Needs of an estimator of the user's are checked as those of a built-in one."""
    options = [*REQUIRED, f"{ESTIMATOR}={own}:grouped", f"{LOSS}={own}:plain"]
    config = cli.compose(options)
    assert list(algorithms.problems(config)) == []
    assert config.needs_every_trajectory  # of an unknown loss, no trajectory may be left out
    with pytest.raises(ConfigError, match=r"rollout\.n_agent"):
        cli.compose([*options, "actor_rollout_ref.rollout.n_agent=1"])
