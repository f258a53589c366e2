"""Trajectories while the retriever is unavailable, fails or hangs."""

import logging
import re
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from search_r1.agent.retriever import build_search
from search_r1.retrieval.server import create_app
from search_r1.retrieval.service.faults import FaultInjector
from search_r1.retrieval.settings import FaultConfig
from tests.apps import running
from tests.retrieval.service.fake_backends import FakeBackend
from tests.verl.trainer.playing import InProcess
from tests.verl.trainer.recording import RecordingReplicas, prompts
from verl.agent.environment import Environment
from verl.agent.interface import Tool, text_arguments
from verl.batch import TokenBatch
from verl.config import Config
from verl.errors import Interrupted, ToolOutage, ToolRefused
from verl.ext import retry
from verl.ext.retry import MAX_VAIN_ROUNDS, Outage, RetryingRollout
from verl.trainer.collect import complete_groups
from verl.trainer.metrics import fault_metrics
from verl.types import Failure, Origin, Sampling, Status, Trajectory, start_trajectory

SAMPLING = Sampling(max_tokens=100)


def starts(count: int = 4) -> list[Trajectory]:
    """Return started trajectories, each with its own group and seed."""
    return [
        start_trajectory(prompt, group=f"1/{i}", sample=i, seed=100 + i)
        for i, prompt in enumerate(prompts(count))
    ]


@dataclass
class Away(Tool):
    """A tool that answers after `probes_until_back` probes, or never."""

    probes_until_back: float = 0
    max_outage: float = 1800.0
    num_probes: int = 0
    name = "search"
    parameters = text_arguments(query="")
    label = "http://there:1/retrieve"
    fix = "start it (bash retrieval_launch.sh)"
    max_outage_option = "retriever.max_outage"

    def probe(self, seconds: float) -> str:
        assert 0 < seconds <= retry.PROBE_S
        self.num_probes += 1
        return "connection refused" if self.num_probes <= self.probes_until_back else ""


def failing(replicas: RecordingReplicas, failures: dict[int, float]) -> RecordingReplicas:
    """Make each sample fail in its number of rounds in `failures`."""
    left = dict(failures)

    def fail(start: Trajectory) -> bool:
        left[start.sample] = left.get(start.sample, 0) - 1
        return left[start.sample] >= 0

    replicas.fail = fail
    return replicas


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the pause between probes."""
    monkeypatch.setattr(retry, "POLL_S", 0.001)


def test_line_19_failed_trajectories_are_sampled_again_from_their_start() -> None:
    """With the same seed, group and position; finished ones are kept; retries are counted."""
    replicas = failing(RecordingReplicas([]), {1: 1, 3: 2})
    rollout = RetryingRollout(replicas, Environment())
    started = starts()
    finished = rollout.generate(started, SAMPLING)
    assert [t.status for t in finished] == [Status.ANSWERED] * 4
    assert [(t.group, t.seed) for t in finished] == [(t.group, t.seed) for t in started]
    assert [[t.seed for t in sent] for sent, _ in replicas.requests] == [
        [100, 101, 102, 103], [101, 103], [103],
    ]  # fmt: skip
    assert fault_metrics(finished) == {
        "fault/trajectories_resampled": 3, "fault/trajectories_failed": 0,
        "fault/trajectories_dropped": 0, "fault/outage_s": 0,
    }  # fmt: skip


def test_repeated_failures_while_the_retriever_answers_are_final() -> None:
    """A query that no server can answer does not block the run for ever."""
    replicas = failing(RecordingReplicas([]), {2: 1000})
    rollout = RetryingRollout(replicas, Environment())
    finished = rollout.generate(starts(), SAMPLING)
    assert [t.status is Status.FAILED for t in finished] == [False, False, True, False]
    assert len(replicas.requests) == 1 + MAX_VAIN_ROUNDS
    assert fault_metrics(finished)["fault/trajectories_failed"] == 1


def test_an_outage_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is sampled meanwhile; one line reports the outage, another its end."""
    replicas = failing(RecordingReplicas([]), {0: 1, 1: 1})
    tool = Away(20)
    rollout = RetryingRollout(replicas, Environment((tool,)))
    with caplog.at_level(logging.WARNING):
        finished = rollout.generate(starts(), SAMPLING)
    assert all(t.status is Status.ANSWERED for t in finished)
    assert (len(replicas.requests), tool.num_probes) == (2, 21)
    lines = [r.getMessage() for r in caplog.records if "http://there:1" in r.getMessage()]
    assert len(lines) == 2
    for part in (
        "connection refused",
        "unavailable for 0 s",
        "for up to 1800 s",
        "bash retrieval_launch",
    ):
        assert part in lines[0]
    assert "answers again after" in lines[1]
    assert fault_metrics(finished)["fault/outage_s"] > 0


def test_an_outage_is_logged_at_intervals(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A further line is logged after LINE_S seconds."""
    monkeypatch.setattr(retry, "LINE_S", 0.0)
    replicas = failing(RecordingReplicas([]), {0: 1})
    with caplog.at_level(logging.WARNING):
        RetryingRollout(replicas, Environment((Away(3),))).generate(starts(), SAMPLING)
    assert sum("the run waits" in r.getMessage() for r in caplog.records) == 3


def test_an_outage_that_lasts_too_long_ends_the_run() -> None:
    """The message has the duration, the limit and the fix; the exit status is 4."""
    tools = Environment((Away(float("inf"), max_outage=0.05),))
    rollout = RetryingRollout(failing(RecordingReplicas([]), {0: 1}), tools)
    with pytest.raises(ToolOutage, match=r"there:1.*max_outage=0\.05.*start it") as caught:
        rollout.generate(starts(), SAMPLING)
    assert caught.value.exit_code == 4


@dataclass
class Clock:
    """A clock that advances only by sleeping and probing; its origin is arbitrary."""

    now: float = -1000.0
    slept: list[float] = field(default_factory=list)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@dataclass
class Slow(Away):
    """A tool whose probes take four seconds; records the timeout of each."""

    clock: Clock = field(default_factory=Clock)
    allowed: list[float] = field(default_factory=list)

    def probe(self, seconds: float) -> str:
        self.allowed.append(seconds)
        self.clock.now += 4.0
        return super().probe(seconds)


def outage_of(tool: Slow, monkeypatch: pytest.MonkeyPatch, started: float | None = None) -> Outage:
    """Return an outage on the tool's clock, with two seconds between probes."""
    monkeypatch.setattr(retry, "time", tool.clock)
    monkeypatch.setattr(retry, "POLL_S", 2.0)
    return Outage(Environment((tool,)), lambda: None, started)


@pytest.mark.parametrize(
    ("max_outage", "allowed", "last_pause", "away"),
    [
        (52.0, [30, 30, 30, 30, 28, 22, 16, 10, 4], 2.0, 52),
        (53.0, [30, 30, 30, 30, 29, 23, 17, 11, 5, 1], 1.0, 57),
    ],
)
def test_an_outage_is_timed_to_the_second(
    max_outage: float, allowed: list[float], last_pause: float, away: int,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Probes start every six seconds with the remaining time; a line is logged every thirty."""
    tool = Slow(float("inf"), max_outage)
    with pytest.raises(ToolOutage, match=f"for {away} s, no less than .*={max_outage:g}"):
        outage_of(tool, monkeypatch).wait(1)
    assert tool.allowed == allowed
    assert tool.clock.slept == [2.0] * (len(allowed) - 2) + [last_pause]
    lines = [record.getMessage() for record in caplog.records]
    assert ["for 4 s" in lines[0], "for 34 s" in lines[1], len(lines)] == [True, True, 2]
    assert f"up to {max_outage - 4:.0f} s more" in lines[0]


def test_an_outage_continues_from_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a tool came back without any progress; the returned seconds are those of this wait."""
    tool = Slow(3, max_outage=100.0)
    outage = outage_of(tool, monkeypatch, started=tool.clock.now - 60.0)
    assert outage.wait(1) == 22.0
    assert tool.allowed == [30, 30, 28, 22]
    assert outage.wait(1) == 0.0  # it answers at once
    tool.num_probes = 0
    with pytest.raises(ToolOutage, match="unavailable for 102 s"):
        outage.wait(1)


def test_seconds_of_an_outage_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are counted for each step, from its first probe to the first that is answered."""
    tool = Slow(2)
    outage_of(tool, monkeypatch)
    replicas = failing(RecordingReplicas([]), {0: 1, 1: 2})
    rollout = RetryingRollout(replicas, Environment((tool,)))
    assert fault_metrics(rollout.generate(starts(), SAMPLING))["fault/outage_s"] == 16.0
    tool.num_probes, replicas.fail = 0, failing(RecordingReplicas([]), {0: 2}).fail
    assert fault_metrics(rollout.generate(starts(), SAMPLING))["fault/outage_s"] == 16.0


def test_a_run_whose_time_is_over_stops_waiting() -> None:
    """The check that is made between steps is also made while the run waits."""

    def check() -> None:
        raise Interrupted("time is over")

    tools = Environment((Away(float("inf")),))
    rollout = RetryingRollout(failing(RecordingReplicas([]), {0: 1}), tools, check)
    with pytest.raises(Interrupted):
        rollout.generate(starts(), SAMPLING)


def test_a_flapping_retriever_is_not_waited_for_endlessly() -> None:
    """Unavailable, back and unavailable again without any progress is a single outage."""

    class Flapping(Away):
        def probe(self, seconds: float) -> str:
            self.num_probes += 1
            return "away" if self.num_probes % 5 else ""

    tools = Environment((Flapping(max_outage=0.1),))
    rollout = RetryingRollout(failing(RecordingReplicas([]), {0: 1e9}), tools)
    with pytest.raises(ToolOutage):
        rollout.generate(starts(), SAMPLING)


def play(faults: FaultConfig, timeout: float) -> tuple[list[Trajectory], InProcess]:
    """Run 60 dialogues with a server that injects `faults`; `timeout` is the client's."""
    with running(FaultInjector(create_app(FakeBackend()), faults)) as url:
        replicas = InProcess(url, timeout)
        config = Config()
        config.retriever.url, config.retriever.topk = url, 1
        config.retriever.timeout = timeout
        rollout = RetryingRollout(replicas, Environment((build_search(config),)))
        return rollout.generate(starts(60), SAMPLING), replicas


def test_line_19_errors_and_hangs_do_not_change_the_trained_tokens() -> None:
    """With 20 % errors and 5 % hangs of a real server, ids and masks are those without faults."""
    undisturbed, _ = play(FaultConfig(), 60.0)
    disturbed, replicas = play(FaultConfig(0.2, 0.05, 0), 1.0)
    assert [t.status for t in disturbed] == [Status.ANSWERED] * 60
    expected, got = (TokenBatch.from_trajectories(ts) for ts in (undisturbed, disturbed))
    for name in ("input_ids", "policy_mask", "response_mask", "rollout_log_probs"):
        assert torch.equal(got.tokens[name], expected.tokens[name]), name
    observed = [s.text for t in disturbed for s in t.segments if s.origin is Origin.OBSERVATION]
    assert len(observed) == 120 and all("what of" in text for text in observed)
    faults = fault_metrics(disturbed)
    assert replicas.num_failed > 0 == faults["fault/trajectories_failed"]
    assert faults["fault/searches_failed"] == replicas.num_failed
    assert faults["fault/trajectories_resampled"] == replicas.num_failed
    assert faults["fault/searches_retried"] >= 10
    assert set(fault_metrics(undisturbed).values()) == {0}


def test_a_tool_that_refuses_the_run_ends_it_at_once() -> None:
    """Whether the probe in the driver or a call in a replica is refused; there is no retry."""

    class Refusing(Away):
        def probe(self, seconds: float) -> str:
            raise ToolRefused("refused with 401; fix: export RETRIEVER_TOKEN")

    replicas = failing(RecordingReplicas([]), {0: 1e9})
    with pytest.raises(ToolRefused, match="RETRIEVER_TOKEN") as caught:
        RetryingRollout(replicas, Environment((Refusing(),))).generate(starts(), SAMPLING)
    assert caught.value.exit_code == 2 and len(replicas.requests) == 1
    with running(create_app(FakeBackend(), token="x")) as url:
        elsewhere = InProcess(url, 5.0)
        with pytest.raises(ToolRefused, match=rf"{url}.*401.*RETRIEVER_TOKEN"):
            RetryingRollout(elsewhere, Environment()).generate(starts(), SAMPLING)
    assert elsewhere.num_failed == 4


def test_a_loss_is_reported_with_its_last_failure_and_the_option_that_allows_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As an error, and in the log if the loss is allowed."""
    everyone = [start_trajectory(p, group=str(i // 2)) for i, p in enumerate(prompts(100))]
    failed = [everyone[0], everyone[2], everyone[4]]
    for number, trajectory in enumerate(failed):
        trajectory.failure = Failure(f"error {number}")
    message = f"the last ({failed[-1].prompt.uid}) with: error 2; 6 of 100 are lost"
    with pytest.raises(ToolOutage) as caught:
        complete_groups(everyone, failed, "step 3", 0.05)
    assert message in str(caught.value) and "step 3: 3 trajectories" in str(caught.value)
    assert str(caught.value).endswith("or allow it: trainer.max_lost_share=0.06")
    assert len(complete_groups(everyone, failed, "step 3", 0.06)) == 94
    assert message in caplog.text


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=30),
    data=st.data(),
    max_share=st.sampled_from([0.0, 0.02, 0.25, 1.0]),
)
def test_only_complete_groups_are_kept_after_failures(
    sizes: list[int], data: st.DataObject, max_share: float
) -> None:
    """All groups without a failure are kept, in order, or the run ends because of the share.

    The share that the message suggests is then sufficient; if nothing is left, none is suggested.
    """
    prompt = prompts(2)[0]
    everyone = [
        start_trajectory(prompt, group=str(g), sample=i)
        for g, size in enumerate(sizes) for i in range(size)
    ]  # fmt: skip
    failed = data.draw(st.lists(st.sampled_from(everyone), unique_by=id))
    expected = [t for t in everyone if t.group not in {f.group for f in failed}]
    num_lost = len(everyone) - len(expected)
    if failed and (not expected or num_lost / len(everyone) > max_share):
        with pytest.raises(ToolOutage, match=rf"{num_lost} of {len(everyone)} ") as caught:
            complete_groups(everyone, failed, "step 3", max_share)
        suggested = re.search(r"allow it: trainer.max_lost_share=(.*)$", str(caught.value))
        assert (suggested is None) == (not expected)
        if suggested:
            assert complete_groups(everyone, failed, "step 3", float(suggested[1])) == expected
    else:
        assert complete_groups(everyone, failed, "step 3", max_share) == expected


@dataclass
class Serving(Tool):
    """A tool that returns a fingerprint of its corpus, if there is one."""

    corpus: str = ""
    name = "search"
    parameters = text_arguments(query="")

    def identity(self) -> dict[str, str]:
        return {"corpus": self.corpus} if self.corpus else {}


@pytest.mark.parametrize(("corpus", "is_another"), [("a", False), ("", False), ("b", True)])
def test_a_service_that_changed_ends_the_run(corpus: str, is_another: bool) -> None:
    """Nothing sampled with another corpus is returned; a server without fingerprint is accepted."""
    served = {"corpus": "a", "data": "d"}
    rollout = RetryingRollout(
        RecordingReplicas([]), Environment((Serving(corpus),)), expected_identity=served
    )
    if not is_another:
        assert len(rollout.generate(starts(), SAMPLING)) == 4
        return
    with pytest.raises(ToolRefused, match=r"got another corpus, .*; fix: serve what was served"):
        rollout.generate(starts(), SAMPLING)
