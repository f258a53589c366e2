"""Which errors mean that a process is gone, and how the cause is described."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch.distributed as dist
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.exceptions import ActorDiedError, NodeDiedError, OutOfMemoryError, RayTaskError

from verl.errors import ModelError, RankLost, ReplicaLost
from verl.single_controller import deaths
from verl.single_controller.actors import RayWorkerGroup
from verl.single_controller.deaths import (
    DEATHS,
    broke_collective,
    cause_of,
    find_dead,
    raise_cause,
)


def raised_by_a_rank(error: Exception) -> RayTaskError:
    return RayTaskError("call", "Traceback ...", error)


@pytest.mark.parametrize(
    "error",
    [
        dist.DistBackendError("ncclRemoteError"),
        dist.DistNetworkError("timed out"),
        RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:3"),
    ],
)
def test_a_rank_that_could_not_reach_another_is_not_a_bug(error: Exception) -> None:
    """Such an error means that another rank died; any other error is the rank's own."""
    assert broke_collective(raised_by_a_rank(error))


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), ValueError("nccl")])
def test_a_bug_is_a_bug(error: Exception) -> None:
    """A run with a bug is not restarted again and again."""
    assert not broke_collective(raised_by_a_rank(error))
    assert not isinstance(raised_by_a_rank(error), DEATHS)


def test_causes_are_short_and_true() -> None:
    """One line, without Ray's list of possible causes."""
    text = (
        "The actor died unexpectedly before finishing this task.\n"
        "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR "
        "Worker exit detail: Worker unexpectedly exits with a connection error code 2. End of "
        "file. Some common causes include: (1) the process was killed by the OOM killer due to "
        "high memory usage, (2) ray stop --force was called."
    )
    died = ActorDiedError(ActorDiedErrorContext(error_message=text, actor_id=bytes(16)))
    assert cause_of(died) == "Worker unexpectedly exits with a connection error code 2"
    assert "node is lost" in cause_of(NodeDiedError("The node has died: x"))
    text = "Task was killed due to the node running low on memory"
    assert "memory" in cause_of(OutOfMemoryError(text))
    assert cause_of(RuntimeError()) == "RuntimeError"


def test_a_users_mistake_found_by_a_rank_is_one_line() -> None:
    """A rank's error for the user is raised without the traceback that Ray adds."""
    error = raised_by_a_rank(ModelError("checkpoint x: got y")).as_instanceof_cause()
    with pytest.raises(ModelError) as caught:
        raise_cause(RayWorkerGroup([], "rank", RankLost), error, {}, 0)
    assert str(caught.value) == "checkpoint x: got y"


def test_the_dead_peer_is_found_and_not_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of the caller is an instance of the peer's death, but the caller still responds."""
    gone = raised_by_a_rank(NodeDiedError("gone")).as_instanceof_cause()
    failed: dict[str, Exception] = {"call 1": gone}

    def get(call: str) -> None:
        if call in failed:
            raise failed[call]

    monkeypatch.setattr(deaths.ray, "wait", lambda calls, timeout: (calls[:1], calls[1:]))
    monkeypatch.setattr(deaths.ray, "get", get)
    group = RayWorkerGroup([], "replica", ReplicaLost)
    runs = [SimpleNamespace(remote=lambda function, i=i: f"location {i}") for i in range(2)]
    group.hosts = [SimpleNamespace(run=run) for run in runs]
    assert find_dead(group, {"call 1": 1}, 10.0) is None
    failed["location 0"] = NodeDiedError("The node has died: x")
    assert find_dead(group, {"call 1": 1}, 10.0) == (0, "its node is lost")
