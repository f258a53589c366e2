"""The driver's half of `ipc` and `nccl`: who is called when, refused, or sent weights again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.verl.rollout.engines import tiny_config
from verl.config import Config
from verl.errors import ConfigError
from verl.ext.transports.stream import TransferStats
from verl.preflight.checks import engine_problems
from verl.single_controller.actors import ActorLocation
from verl.weights.files import selected_transport

ROLLOUT = "actor_rollout_ref.rollout"


class Group:
    """Two training ranks, one on each of the devices `a` and `b`; records what is called."""

    def __init__(self, log: list[str]) -> None:
        self.log, self.group = log, self
        self.receivers: list[Sequence[int]] = []

    def __len__(self) -> int:
        return 2

    def locations(self) -> list[ActorLocation]:
        return [ActorLocation("node", "host", ())] * 2

    def call(self, method: str) -> list[str]:
        return ["a", "b"]

    def submit(self, index: int, method: str, host: str, num_receivers: int) -> str:
        assert (index, host, num_receivers) == (0, "host", 3)
        self.log.append(method)
        return f"host:{len(self.log)}:4"

    def gather(self, calls: Sequence[str]) -> list[str]:
        return list(calls)

    def scatter(
        self, method: str, shards: Sequence[int], address: str, dtype: str
    ) -> list[TransferStats]:
        self.log.append(method)
        self.receivers.append(shards)
        return [TransferStats(0.001, 300), TransferStats(0.002, 100)]


class Two:
    """Two engines with three workers on the ranks' devices, or on others."""

    dtype, loading = "float32", ()

    def __init__(self, log: list[str], devices: str = "ab b") -> None:
        self.log, self.devices = log, devices
        self.group: Any = [None, None]
        self.sources: list[str] = []

    def call(self, method: str) -> list[list[str]]:
        return [list(names) for names in self.devices.split()]

    def pause(self, version: int) -> None:
        self.log.append(f"pause {version}")

    def load(self, sources: Sequence[str], version: int) -> None:
        self.log.append(f"load {version}")
        self.sources += [*set(sources)]


@pytest.mark.parametrize("name", ["ipc", "nccl"])
def test_engines_wait_for_weights_before_ranks_send_them(name: str) -> None:
    """New engines are sent the last version again, with NCCL by a new broadcast."""
    config, log = Config(), list[str]()
    config.actor_rollout_ref.rollout.weight_sync = name
    transport, ranks, engines = selected_transport(config)(config), Group(log), Two(log)
    transport.resend(engines)
    assert log == []  # nothing was sent yet
    opened = ["sender.open"] if name == "nccl" else []
    parts = transport.send(ranks, engines, 1)
    assert set(parts) == {"wait", "gather", "write"} and parts["write"] == 0.002
    assert transport.metrics == {"perf/weights_sent_bytes": 400.0}
    sent = ["pause 1", *opened, "load 1", "sender.send"]
    assert log == sent
    transport.resend(engines)
    assert log == sent * 2
    transport.send(ranks, engines, 2)
    assert log[len(sent) * 2 :] == ["pause 2", "load 2", "sender.send"]
    assert all(source.startswith(f"{name}://") for source in engines.sources)
    assert len(set(engines.sources)) == (2 if opened else 3)
    assert ranks.receivers[0] == ([0, 0] if opened else [1, 2])


def test_an_engine_on_a_device_without_a_rank_cannot_receive_by_ipc() -> None:
    """The error names the device."""
    config = Config()
    config.actor_rollout_ref.rollout.weight_sync = "ipc"
    transport = selected_transport(config)(config)
    with pytest.raises(ConfigError, match=f"{ROLLOUT}.weight_sync: got an engine on c"):
        transport.send(Group([]), Two([], "ac"), 1)


@pytest.mark.parametrize(
    ("name", "options", "key"),
    [
        ("ipc", {"rollout.max_staleness": 1}, "weight_sync"),
        ("ipc", {"trainer.rollout_gpus": 1}, "weight_sync"),
        ("nccl", {}, "weight_sync"),
        ("nccl", {"trainer.rollout_gpus": 1, "rollout.max_staleness": 1, "rollout.partial": False},
         "partial"),
    ],
)  # fmt: skip
def test_placements_that_a_transport_does_not_reach(
    name: str, options: dict[str, Any], key: str, tmp_path: Path
) -> None:
    """Engines must wait on the ranks' devices with ipc, and be on their own with nccl."""
    config = tiny_config(tmp_path, "vllm")
    config.actor_rollout_ref.rollout.weight_sync = name
    for option, value in options.items():
        section, _, field = option.rpartition(".")
        setattr(config.trainer if section == "trainer" else config.actor_rollout_ref.rollout,
                field, value)  # fmt: skip
    (problem,) = map(str, engine_problems(config))
    assert problem.startswith(f"{ROLLOUT}.{key}: got ")
    assert f"{ROLLOUT}.weight_sync=files" in problem or "weight_sync=nccl" in problem


def test_weight_sync_without_files_needs_an_engine_that_receives(tmp_path: Path) -> None:
    """Rejected before any work; so is an adapter, which is small enough for a file."""
    config = tiny_config(tmp_path, "transformers")
    config.actor_rollout_ref.rollout.weight_sync = "ipc"
    (problem,) = map(str, engine_problems(config))
    assert "weight_sync: got ipc, expected files" in problem
    config.actor_rollout_ref.rollout.name = "vllm"
    assert list(engine_problems(config)) == []
    config.actor_rollout_ref.model.lora_rank = 8
    config.actor_rollout_ref.rollout.merge_adapter = False
    (problem,) = map(str, engine_problems(config))
    assert "only the adapter is transferred" in problem
