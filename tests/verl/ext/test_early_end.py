"""A run stopped within a step saves the last finished one, and resumes as if never stopped."""

import contextlib
import errno
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.full_disk import files_up_to
from tests.verl.trainer.recording import RecordingReplicas, build_trainer, grpo_config, hook_of
from verl.checkpoint import folders
from verl.config import Config
from verl.core_algos.kl import AdaptiveKLController
from verl.errors import (
    Interrupted,
    PluginError,
    RankLost,
    ResourceError,
    SaveError,
    ToolOutage,
    ToolRefused,
)
from verl.ext import early_end
from verl.ext.stopping import Stopper
from verl.ext.trace import Trace
from verl.monitor.tracking import JsonlTracker, Tracker, Tracking
from verl.trainer.validate import Validation
from verl.types import Sampling, Trajectory


class DisturbedReplicas(RecordingReplicas):
    """Calls `disturb` during the n-th request."""

    def __init__(self, log: list[str], number: int, disturb: Callable[[], None]) -> None:
        super().__init__(log)
        self.number, self.disturb = number, disturb

    def generate(self, starts: list[Trajectory], sampling: Sampling) -> list[Trajectory]:
        if len(self.requests) + 1 == self.number:
            self.disturb()
        return super().generate(starts, sampling)


def run_config(folder: Path) -> Config:
    """Return the options of four steps, each validated; KL in the reward changes the controller."""
    config = grpo_config(folder)
    config.trainer.test_freq = 1
    config.trainer.val_before_train = False
    config.trainer.resume_mode = "auto"
    config.data.val_batch_size = 8
    config.actor_rollout_ref.actor.ppo_mini_batch_size = 8
    return config


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Options of a run in a folder of the test."""
    return run_config(tmp_path)


OPEN = contextlib.ExitStack()


@pytest.fixture(autouse=True)
def closed_files() -> Iterator[None]:
    """Close the trackers, as a program that builds a trainer does."""
    yield
    OPEN.close()


def build(config: Config, number: int = 0, disturb: Callable[[], None] = lambda: None) -> Any:
    folder = Path(config.trainer.default_local_dir)
    return build_trainer(
        config, [], rollouts=DisturbedReplicas([], number, disturb), total_steps=4,
        kl_controller=AdaptiveKLController(0.1, 0.01, 100),
        logger=OPEN.enter_context(Tracking("p", "e", [JsonlTracker(folder)], str(folder))),
    )  # fmt: skip


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def fill_the_disk() -> None:
    raise OSError(errno.ENOSPC, "No space left on device", "rollouts/step_2.jsonl")


def lose_a_tool() -> None:
    raise ToolOutage("away for 31 min")


def lose_a_token() -> None:
    raise ToolRefused("refused with 401")


def fail_in_user_code() -> None:
    raise PluginError("reward own.py:f at nq#1: got None")


def logged(config: Config) -> list[dict[str, Any]]:
    """Return all logged metrics without times."""
    path = Path(config.trainer.default_local_dir) / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    timed = ("perf/", "timing_")
    return [{k: v for k, v in row.items() if not k.startswith(timed)} for row in rows]


def seeds(trainer: Any) -> list[list[int]]:
    return [[start.seed for start in starts] for starts, _ in trainer.rollouts.requests]


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """Metrics and requests of the run that is not stopped."""
    config = run_config(tmp_path_factory.mktemp("undisturbed"))
    trainer = build(config)
    trainer.fit()
    return logged(config), seeds(trainer)


@pytest.mark.parametrize("number", [3, 4], ids=["sampling", "validating"])
@pytest.mark.parametrize(
    ("disturb", "error"),
    [(terminate, Interrupted), (lose_a_tool, ToolOutage), (lose_a_token, ToolRefused),
     (fail_in_user_code, PluginError)],
)  # fmt: skip
def test_a_run_stopped_anywhere_ends_as_the_undisturbed_one(
    config: Config, undisturbed: Any, number: int, disturb: Any, error: Any
) -> None:
    """Stopped while step 2 is sampled or validated: each step is logged once, as without."""
    stopped = build(config, number, disturb)
    with pytest.raises(error, match=r"global_step_\d.*resume_mode=auto"):
        stopped.fit()
    step = 1 if number == 3 else 2
    found = folders.latest(Path(config.trainer.default_local_dir))
    assert found is not None and folders.step_of(found) == step
    resumed = build(config)
    resumed.fit()
    rows, requests = undisturbed
    assert logged(config) == rows
    assert seeds(stopped) + seeds(resumed) == requests
    assert hook_of(resumed, Validation).best == {
        "metric": "val/score",
        "value": rows[0]["val/score"],
        "step": 1,
    }


def test_an_update_is_never_interrupted(config: Config) -> None:
    """A signal during the update waits for the end of the step."""
    trainer = build(config)
    update = trainer.ranks.update
    trainer.ranks.update = lambda *arguments: (terminate(), update(*arguments))[1]
    with pytest.raises(Interrupted, match="global_step_1"):
        trainer.fit()
    assert trainer.ranks.log.count("update_actor") == 1
    state = folders.read_state(Path(config.trainer.default_local_dir) / "global_step_1")
    assert state["pending"] is not None  # the resumed run starts with its validation


def test_nothing_is_saved_before_the_first_step(config: Config) -> None:
    """Nothing was learned, and the message says so."""
    with pytest.raises(Interrupted):
        build(config, 1, terminate).fit()
    assert folders.latest(Path(config.trainer.default_local_dir)) is None


def test_a_step_that_was_saved_is_not_saved_again(config: Config) -> None:
    """An outage right after a checkpoint names that checkpoint."""
    config.trainer.save_freq = 1
    trainer = build(config, 3, lose_a_tool)
    with pytest.raises(ToolOutage, match="global_step_1"):
        trainer.fit()
    saved = [entry for entry in trainer.ranks.log if entry.startswith("save")]
    assert saved == ["save global_step_1"]


def test_a_keyboard_interrupt_without_a_signal_is_not_handled(config: Config) -> None:
    """A KeyboardInterrupt that no signal handler raised is not a request to save."""

    def ctrl_c() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(config, 3, ctrl_c).fit()


def test_a_second_ctrl_c_ends_at_once(config: Config) -> None:
    """A second Ctrl-C does not wait for a checkpoint, whatever the run is doing."""
    trainer = build(config, 3, press_ctrl_c)
    trainer.ranks.save_checkpoint = lambda folder: press_ctrl_c()
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    assert folders.latest(Path(config.trainer.default_local_dir)) is None
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_full_disk_at_the_metrics_loses_nothing(config: Config, undisturbed: Any) -> None:
    """A line that does not fit completely is not written; the resumed run writes it."""
    stopped = build(config)
    file = Path(config.trainer.default_local_dir) / "metrics.jsonl"
    log = stopped.logger.log

    def log_on_a_full_disk(metrics: Any, step: int) -> None:
        with files_up_to(9):
            log(metrics, step)

    stopped.logger.log = log_on_a_full_disk
    with pytest.raises(Interrupted, match=r"metrics\.jsonl"):
        stopped.fit()
    assert file.read_bytes() == b""
    build(config).fit()
    assert logged(config) == undisturbed[0]


def test_a_full_disk_at_the_trace_saves_the_learned_step(config: Config, undisturbed: Any) -> None:
    """Its weights are not saved as those of the step before, which would repeat its updates."""
    config.trainer.trace = True
    stopped = build(config)

    def full(step: int, *_: Any) -> None:
        if step == 2:
            fill_the_disk()

    hook_of(stopped, Trace).add_step = full
    with pytest.raises(Interrupted, match=r"global_step_2.*resume_mode=auto"):
        stopped.fit()
    build(config).fit()
    assert logged(config) == undisturbed[0]


@pytest.mark.parametrize("error", [PluginError("on_step: no"), Interrupted("enough")])
def test_a_callback_that_fails_or_stops_loses_nothing(
    error: Exception, config: Config, undisturbed: Any
) -> None:
    """The step that it was called for is saved, and finished and logged once by the resumed run."""

    class Callback(Tracker):
        def log(self, metrics: Any, step: int) -> None:
            if step == 2:
                raise error

    stopped = build(config)
    stopped.logger = Tracking("p", "e", ["jsonl", Callback()], config.trainer.default_local_dir)
    with stopped.logger, pytest.raises(type(error), match="global_step_2"):
        stopped.fit()
    build(config).fit()
    assert logged(config) == undisturbed[0]


def test_a_full_disk_names_the_last_checkpoint(config: Config) -> None:
    """The run stops with one line even if the finished step cannot be saved either."""
    config.trainer.save_freq = 1
    trainer = build(config, 5, fill_the_disk)
    trainer.ranks.can_copy_checkpoint = lambda: False
    save = trainer.ranks.save_checkpoint

    def full_from_step_2_on(folder: Path) -> None:
        if "global_step_1" not in folder.name:
            raise SaveError("rank 0: No space left on device")
        save(folder)

    trainer.ranks.save_checkpoint = full_from_step_2_on
    with pytest.raises(Interrupted, match=r"step_2\.jsonl'; saved .*global_step_1:"):
        trainer.fit()


def lack_space(*_: Any) -> Any:
    raise ResourceError("model: got No space left on device")


def test_a_full_disk_at_the_export_saves_what_was_learned(config: Config, undisturbed: Any) -> None:
    """A checkpoint is saved even if none was due; the resumed run only has to write the model."""
    stopped = build(config)
    stopped.ranks.save_policy = lack_space
    with pytest.raises(Interrupted, match=r"global_step_4.*resume_mode=auto"):
        stopped.fit()
    build(config).fit()
    assert logged(config) == undisturbed[0]


def test_no_space_for_the_engines_weights_waits_for_the_last_checkpoint(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long that takes; the ranks' newer weights are not saved as the finished step."""
    monkeypatch.setattr(early_end, "LOST_RANK_TIMEOUT_S", 0.0)
    config.trainer.save_freq = 1
    stopped = build(config)
    update = stopped.rollouts.update_weights
    stopped.rollouts.update_weights = lambda *a: lack_space() if stopped.step == 2 else update(*a)
    stopped.ranks.finish_checkpoint = lambda: time.sleep(0.3)
    with pytest.raises(Interrupted, match="global_step_1"):
        stopped.fit()


def test_a_lost_rank_keeps_what_was_written(config: Config) -> None:
    """The run waits for the background write of the step before; nothing new is saved."""
    config.trainer.save_freq = 1

    def lose_a_rank() -> None:
        raise RankLost("rank 0 died")

    with pytest.raises(RankLost):
        build(config, 5, lose_a_rank).fit()
    found = folders.latest(Path(config.trainer.default_local_dir))
    assert found is not None and folders.step_of(found) == 2


def test_a_run_started_anew_never_resumes_from_another(config: Config) -> None:
    """Steps 1 to 4 of a first run are set aside when a second run starts in its folder."""
    config.trainer.save_freq = 1
    build(config).fit()
    config.trainer.resume_mode = "disable"
    with pytest.raises(Interrupted):
        build(config, 3, terminate).fit()
    folder = Path(config.trainer.default_local_dir)
    assert [path.name for path in folders.all_complete(folder)] == ["global_step_1"]
    assert len(list(folder.glob("set_aside/*/global_step_*"))) == 4


def test_an_unknown_best_metric_ends_the_run_at_its_first_validation(config: Config) -> None:
    """Before the first step, with the metrics that were measured and the nearest one."""
    config.trainer.best_metric, config.trainer.val_before_train = "val/emm", True
    trainer = build(config)
    with pytest.raises(PluginError, match=r"trainer\.best_metric"):
        trainer.fit()
    assert trainer.step == 0


def test_a_validation_alone_changes_nothing(config: Config) -> None:
    """`val_only` in the folder of a run keeps its checkpoints, so that it can be resumed."""
    config.trainer.save_freq = 2
    build(config).fit()
    config.trainer.resume_mode, config.trainer.val_only = "disable", True
    trainer = build(config)
    trainer.fit()
    assert "update_actor" not in trainer.ranks.log
    folder = Path(config.trainer.default_local_dir)
    assert [folders.step_of(path) for path in folders.all_complete(folder)] == [2, 4]


def test_a_signal_that_ended_the_ranks_too_stops_the_run(config: Config) -> None:
    """They are not restarted: the run is interrupted, to be resumed from its last checkpoint."""
    config.trainer.save_freq = 1

    def end_everything() -> None:
        hook_of(trainer, Stopper).reason = "the run received SIGTERM"
        raise RankLost("rank 0 died")

    trainer = build(config, 5, end_everything)
    with pytest.raises(Interrupted, match="global_step_2"):
        trainer.fit()


def test_ranks_that_die_while_a_stopped_run_saves_do_not_hide_the_reason(config: Config) -> None:
    """The error names the last complete checkpoint, not the one that could not be written."""
    config.trainer.save_freq = 2
    trainer = build(config, 7, terminate)

    def die(directory: Path) -> None:
        raise RankLost("rank 0 died")

    trainer.ranks.save_checkpoint, trainer.ranks.start_checkpoint = die, lambda directory: None
    with pytest.raises(Interrupted, match="global_step_2"):
        trainer.fit()
    folder = Path(config.trainer.default_local_dir)
    assert [path.name for path in folder.glob("global_step_*")] == ["global_step_2"]
