"""The core's checkpoints without the hooks beside them; `ext/test_early_end.py` has both."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.verl.trainer.recording import build_trainer, grpo_config, hook_of
from verl.checkpoint import folders
from verl.errors import RankLost
from verl.trainer.checkpoints import Checkpoints


def test_a_failed_run_waits_for_its_background_write_and_is_resumed(tmp_path: Path) -> None:
    """The step before the failure is complete when the error arrives, and the next run has it."""
    config = grpo_config(tmp_path)
    config.trainer.save_freq, config.trainer.resume_mode = 1, "auto"

    def alone() -> Any:
        trainer = build_trainer(config, [], total_steps=3)
        return replace(trainer, hooks=[hook_of(trainer, Checkpoints)])

    failing = alone()
    update, finish = failing.ranks.update, failing.ranks.finish_checkpoint

    def lose_a_rank(*arguments: Any) -> Any:
        if failing.step == 2:
            raise RankLost("rank 0 died")
        return update(*arguments)

    failing.ranks.update = lose_a_rank
    failing.ranks.finish_checkpoint = lambda: (time.sleep(0.3), finish())[1]
    with pytest.raises(RankLost):
        failing.fit()
    found = folders.latest(tmp_path)
    assert found is not None and folders.step_of(found) == 1
    resumed = alone()
    resumed.fit()
    assert (resumed.step, resumed.ranks.log.count("update_actor")) == (3, 2)
