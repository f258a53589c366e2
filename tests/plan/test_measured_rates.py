"""Rates and dialogues read from a run's files, and engine rates fitted to rollouts."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from search_r1.plan.command import RateOptions
from search_r1.plan.placements import fit_decode, read_decode
from search_r1.plan.planning import Observation, fit_engine, read_run, simulate_rollout
from search_r1.plan.simulation import EngineRates
from search_r1.plan.workload import Dialogue, LogNormal, Turn, Workload
from verl.config import Config
from verl.data.trajectories import write_step
from verl.errors import ConfigError, DataError
from verl.rewards.interface import Reward
from verl.types import Origin, Prompt, Segment, Trajectory

TRUE_RATES = EngineRates(step_s=0.012, sequence_s=0.0004, prefill_tokens_s=3000, slots=16)
WORKLOAD = Workload(
    16, 4, LogNormal(100, 100), LogNormal(40, 120), LogNormal(80, 80), (0, 1), LogNormal(0.2, 1),
    200, 200,
)  # fmt: skip


def observe(num_prompts: int, slots: int, seed: int) -> Observation:
    """Return a rollout that takes as long as with the true rates."""
    batch = replace(WORKLOAD, num_prompts=num_prompts).draw(seed)
    unmeasured = Observation(batch, 1, slots, 0.0)
    return replace(unmeasured, seconds=simulate_rollout(TRUE_RATES, unmeasured))


def test_fitted_rates_predict_other_rollouts() -> None:
    """Within 3 %, from four rollouts, with start values for engines three times as fast."""
    observations = [observe(n, slots, n) for n, slots in ((2, 4), (4, 16), (16, 8), (16, 32))]
    start = replace(TRUE_RATES, step_s=0.004, sequence_s=0.0001, prefill_tokens_s=10_000)
    fitted = fit_engine(observations, start)
    for num_prompts, slots in ((3, 12), (8, 24), (24, 48)):
        other = observe(num_prompts, slots, 100 + num_prompts)
        assert simulate_rollout(fitted, other) == pytest.approx(other.seconds, rel=0.03)
    known = fit_engine(observations, replace(start, prefill_tokens_s=3000), knows_prefill=True)
    assert known.prefill_tokens_s == 3000
    assert known.step_s == pytest.approx(TRUE_RATES.step_s, rel=0.1)


def test_decode_rates_are_fitted_by_two_numbers() -> None:
    """Exactly if the points are on a line of steps' seconds; no number is below 0."""
    points = [(n, n / (0.01 + 0.0002 * n)) for n in (1.0, 64.0, 256.0)]
    assert fit_decode(points) == pytest.approx((0.01, 0.0002))
    assert fit_decode([(1.0, 10.0), (10.0, 200.0)]) == pytest.approx((0.075, 0.0))
    assert fit_decode([(1.0, 10.0), (10.0, 10.0)])[0] == 0.0


@pytest.mark.parametrize("text", ["64", "64:100", "64:0,1:1", "a:b,c:d", "1:2,1:3", "1:nan,2:3"])
def test_malformed_decode_rates_are_refused(text: str) -> None:
    """The message shows the expected form."""
    with pytest.raises(ConfigError, match=r"^--decode: got .*, expected sequences:tokens/s"):
        read_decode(text)


def run_folder(folder: Path) -> Config:
    """Write the files of a run with three steps, the first slower; returns its options."""
    prompt = Prompt("f#0", (1,) * 30, "nq", ("x",))
    segments = [
        Segment(Origin.PROMPT, prompt.ids),
        Segment(Origin.POLICY, (2,) * 12, log_probs=(0.0,) * 12),
        Segment(Origin.OBSERVATION, (3,) * 50),
        Segment(Origin.POLICY, (2,) * 8, log_probs=(0.0,) * 8),
    ]
    (folder / "rollouts").mkdir()
    rows = []
    for step in (1, 2, 3):
        write_step(folder / "rollouts", step, [Trajectory(prompt, segments)] * 4, [Reward(0.0)] * 4)
        rows.append({
            "step": step, "timing_s/gen": 2.0, "timing_s/update_actor": 30.0 if step == 1 else 4.0,
            "timing_s/old_log_prob": 1.0, "timing_s/update_weights": 2.5, "timing_s/values": None,
            "timing_s/update_weights/gather": 0.5, "timing_s/update_weights/write": 1.0,
            "timing_s/update_weights/wake_up": 0.25,
            "timing_s/update_weights/load": 0.75, "timing_s/step": 10.0,
            "perf/total_num_tokens": 400.0,
        })  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = Config()
    config.trainer.rollout_data_dir = str(folder / "rollouts")
    config.data.train_batch_size, config.actor_rollout_ref.rollout.n_agent = 1, 4
    config.trainer.n_gpus_per_node = 2
    return config


def test_dialogues_and_rates_are_read_from_a_run(tmp_path: Path) -> None:
    """Token counts, and seconds without those of the first step; given rates are kept."""
    config = run_folder(tmp_path)
    run = read_run(tmp_path, config)
    assert run.dialogues == (Dialogue(30, (Turn(12, 50), Turn(8))),) * 12
    rates = run.rates(RateOptions(adopt_s=9.0), config)
    assert rates.train_tokens_s == pytest.approx(400 / 5 / 2)
    assert (rates.publish_s, rates.adopt_s, rates.switch_s) == (1.5, 9.0, 0.25)
    assert rates.driver_tokens_s == pytest.approx(400 / 0.5)
    rates = run.rates(RateOptions(switch_s=5.0, driver_tokens_s=9e5), config)
    assert (rates.switch_s, rates.driver_tokens_s) == (5.0, 9e5)
    observed = run.observations(config, LogNormal(0.5, 0.5), on_gpu=True)
    assert [observation.seconds for observation in observed] == [2.0, 2.0]
    assert observed[0].batch.dialogues[0].turns == (Turn(12, 50, 0.5), Turn(8))


def rewrite_metrics(folder: Path, **changes: float) -> None:
    """Set metrics of every step of a run."""
    path = folder / "metrics.jsonl"
    rows = [{**json.loads(line), **changes} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_concurrent_seconds_of_actor_and_critic_count_once(tmp_path: Path) -> None:
    """A critic on separate cards adds only the time that the actor waits for it."""
    config = run_folder(tmp_path)
    config.critic.n_gpus_per_node = 2
    concurrent = {"timing_s/values": 3.0, "timing_s/update_critic": 4.0}
    rewrite_metrics(tmp_path, **concurrent, **{"timing_s/wait_critic": 0.25})
    rates = read_run(tmp_path, config).rates(RateOptions(), config)
    assert rates.train_tokens_s == pytest.approx(400 / 5.25 / 2)
    assert rates.driver_tokens_s == pytest.approx(400 / 0.25)


def test_loading_during_training_is_not_measured(tmp_path: Path) -> None:
    """The trainer does not wait for engines that load weights while it trains."""
    config = run_folder(tmp_path)
    config.actor_rollout_ref.rollout.max_staleness = 1
    rates = read_run(tmp_path, config).rates(RateOptions(), config)
    assert (rates.publish_s, rates.adopt_s) == (1.5, None)


def test_reading_recorded_trajectories_is_no_rollout(tmp_path: Path) -> None:
    """A run on recorded trajectories does not measure engines."""
    config = run_folder(tmp_path)
    run = read_run(tmp_path, config)
    config.data.rollouts = config.trainer.rollout_data_dir
    assert run.observations(config, LogNormal(0.5, 0.5), on_gpu=True) == []


def test_a_folder_without_steps_is_refused(tmp_path: Path) -> None:
    """A malformed trajectory is refused too."""
    with pytest.raises(DataError, match=r"^--run: got .*, expected metrics.jsonl"):
        read_run(tmp_path, Config())
    config = run_folder(tmp_path)
    (tmp_path / "rollouts" / "step_00000009.jsonl").write_text('{"step": 9, "segments": [1]}\n')
    with pytest.raises(DataError, match=r"line 1: got .*, expected a trajectory"):
        read_run(tmp_path, config)
