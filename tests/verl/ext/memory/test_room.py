"""Undecided options use free GPU memory to save time."""

from __future__ import annotations

from operator import attrgetter

from tests.verl.ext.memory.test_presets import machine
from tests.verl.ext.memory.test_shortages import run, setting
from verl.config import Config
from verl.config.policy import SELECTIVE
from verl.ext.memory.check import decide_memory, peak_rank_bytes
from verl.ext.memory.estimate import estimate
from verl.preflight.undecided import MEMORY_FOR_SPEED, fill_undecided, with_options

KEYS = [key for key in MEMORY_FOR_SPEED if key.startswith("actor")]


def open_run() -> Config:
    config = with_options(run(8), dict.fromkeys(KEYS))
    config.trainer.device = "cuda"
    return config


def test_free_memory_is_used_to_save_time() -> None:
    """On the largest cards for everything, on the smallest for nothing; a tenth stays free."""
    chosen = []
    for gib in (23.5, 79.0, 500.0):
        here = setting("Qwen2.5-3B", machine(8, gib, 1000))
        decided = decide_memory(open_run(), here)
        spent = [key for key in KEYS if attrgetter(key)(decided) is False]
        assert (
            not spent
            or peak_rank_bytes(estimate(decided, here)) <= 0.9 * here.machine.devices[0].free
        )
        chosen.append(len(spent))
    assert chosen == sorted(chosen) and (chosen[0], chosen[-1]) == (0, len(KEYS))


def test_selective_checkpointing_is_used_between_all_and_nothing() -> None:
    """Checkpointing is selective if half of a micro-batch's activations fit."""
    decided = decide_memory(open_run(), setting("Qwen2.5-3B", machine(8, 79.0, 1000)))
    assert attrgetter(KEYS[0])(decided) == SELECTIVE


def test_no_memory_is_used_without_an_estimate_or_against_the_user() -> None:
    """Without an estimate, on a CPU, and where the user has set the options."""
    for decided in (decide_memory(open_run(), None), fill_undecided(open_run())):
        assert all(attrgetter(key)(decided) is True for key in KEYS)
    here = setting("Qwen2.5-3B", machine(8, 500.0, 1000))
    for value in (True, False):
        decided = decide_memory(with_options(open_run(), dict.fromkeys(KEYS, value)), here)
        assert all(attrgetter(key)(decided) is value for key in KEYS)
