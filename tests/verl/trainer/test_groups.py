"""How a run's processes are placed and started."""

import pytest

from tests.verl.trainer.test_ranks import FakeGroup
from verl.config import Config
from verl.errors import ConfigError
from verl.trainer import groups


@pytest.mark.parametrize(("use_gpu", "per_replica", "replicas"), [(True, 2, 2), (False, 0, 1)])
def test_an_engine_gets_as_many_gpus_as_its_tensor_parallel_size(
    use_gpu: bool, per_replica: int, replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CPU, engines get no GPUs, and there is one engine per node."""

    class Placed(Exception):
        """Raised instead of building the engines."""

    def create_rollout_group(locations: object, number: int, gpus: int, *_: object) -> None:
        raise Placed(number, gpus)

    config = Config()
    config.trainer.n_gpus_per_node = 4
    config.actor_rollout_ref.rollout.tensor_model_parallel_size = 2
    for name, answer in {
        "uses_gpus": use_gpu, "reserve": None, "nodes_of": {},
        "create_trainer_group": FakeGroup(["rank"]),
    }.items():  # fmt: skip
        monkeypatch.setattr(groups, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(groups, "create_rollout_group", create_rollout_group)
    with pytest.raises(Placed) as placed:
        groups.build_groups(config, None, 1, groups.StartUp(), None)  # type: ignore[arg-type]
    assert placed.value.args == (replicas, per_replica)


@pytest.mark.parametrize(("rollout_gpus", "max_engines"), [(0, 4), (2, 2)])
def test_more_engines_than_fit_on_the_gpus_are_refused(
    rollout_gpus: int, max_engines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is placed, also if the device is `auto`."""

    class Reserved(Exception):
        """Raised if no problem was found."""

    def reserve(*_: object) -> None:
        raise Reserved

    config = Config()
    config.trainer.n_gpus_per_node, config.trainer.nnodes = 4, 2
    config.trainer.rollout_gpus = rollout_gpus
    config.actor_rollout_ref.rollout.tensor_model_parallel_size = 2
    monkeypatch.setattr(groups, "uses_gpus", lambda config: True)
    monkeypatch.setattr(groups, "reserve", reserve)
    for number, error in ((max_engines, Reserved), (max_engines + 1, ConfigError)):
        config.actor_rollout_ref.rollout.num_replicas = number
        message = None if error is Reserved else f"at most {max_engines}:"
        with pytest.raises(error, match=message):
            groups.build_groups(config, None, 1, groups.StartUp(), None)  # type: ignore[arg-type]
