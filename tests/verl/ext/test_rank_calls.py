"""What ranks did in a step, by their own clocks."""

from types import SimpleNamespace
from typing import Any

from verl.ext.rank_calls import RankCalls, concurrent_seconds
from verl.ext.speed import Work, speed_metrics
from verl.monitor.performance import Timings
from verl.single_controller import calls
from verl.single_controller.calls import Call


def test_a_critic_on_separate_devices_has_its_own_seconds_and_ranks() -> None:
    """The seconds of its slowest rank count for its speed."""
    calls = {
        "rank 0": [Call("actor.update", 0.0, 9.0)],
        "critic rank 0": [Call("critic.values", 1.0, 2.0), Call("critic.updates", 2.0, 4.0)],
        "critic rank 1": [Call("critic.updates", 2.0, 3.5), Call("critic.updates", 4.0, 5.0)],
    }
    seconds = concurrent_seconds(calls, ["update_actor"])
    assert seconds == {"values": 1.0, "update_critic": 2.5}
    work = {"update_critic": Work(5e12), "update_actor": Work(9e12)}
    found = speed_metrics(work, {**seconds, "update_actor": 9.0}, (1, 2), None)
    assert found == {"perf/tflops/critic": 1.0, "perf/tflops/actor": 1.0}
    assert concurrent_seconds(calls, ["values", "update_critic"]) == {}


def test_a_step_has_the_calls_since_the_step_before() -> None:
    """The critic's seconds are metrics, but not in the total of the phases."""

    class Group:
        name = "critic rank"

        def run(self, function: Any) -> list[Any]:
            return [function()]

    calls.take()
    timings = Timings()
    with timings.phase("values"):
        calls.note("critic.updates", 0.0)
    trainer: Any = SimpleNamespace(
        ranks=SimpleNamespace(groups=[Group()]), current=SimpleNamespace(timings=timings)
    )
    metrics: dict[str, float] = {}
    RankCalls().on_trained(trainer, metrics)
    assert [call.method for call in trainer.current.calls["critic rank 0"]] == ["critic.updates"]
    assert metrics.keys() == {"timing_s/update_critic"} and metrics["timing_s/update_critic"] > 0
    assert timings.phases_total == timings.seconds["values"] and not calls.take()
