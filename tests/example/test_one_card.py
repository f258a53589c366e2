"""example/recipes/one_card.sh: what its page says of memory is what the preflight estimates."""

from operator import attrgetter
from pathlib import Path

import pytest
from transformers import Qwen3Config

from tests.test_train_scripts import ROOT, config_of
from tests.verl.ext.memory.shapes import shape_of
from tests.verl.ext.memory.test_presets import machine
from verl.config.checks import problems
from verl.ext.memory.check import choose_memory
from verl.ext.memory.estimate import REFUSE_ABOVE, WARN_ABOVE, Setting, estimate
from verl.ext.memory.needs import Memory
from verl.ext.model_shape import ModelShape
from verl.preflight.undecided import OFFLOAD_OPTIONS

SCRIPT = "example/recipes/one_card.sh"
QWEN3 = Qwen3Config(
    hidden_size=2048, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
    head_dim=128, intermediate_size=6144, vocab_size=151936, tie_word_embeddings=True,
)  # fmt: skip
"""Qwen3-1.7B as published."""
OFFLOADED = {
    "nothing": set(),
    "optimizer state": {"actor_rollout_ref.actor.fsdp_config.optimizer_offload"},
    "weights, optimizer state": {"actor_rollout_ref.actor.fsdp_config.param_offload"},
}


def rows() -> list[list[str]]:
    """Return model, weights, card, host and what is offloaded, of each row of the page."""
    lines = (ROOT / "example/recipes/README.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:6]] for line in lines if "| Qwen" in line]
    assert len(cells) == 8
    return cells


@pytest.mark.parametrize("phase", ["reading", "searching"])
@pytest.mark.parametrize("row", rows(), ids=" ".join)
def test_the_memory_of_a_row(row: list[str], phase: str, tmp_path: Path) -> None:
    """A row fits a card of 24 GB with 64 GB of host memory, with these peaks, or is refused."""
    name, weights, card, host, offloaded = row
    config = config_of(SCRIPT, tmp_path, MODEL=f"Qwen/{name}", WEIGHTS=weights, PHASE=phase)
    shape = ModelShape.of(QWEN3) if name == "Qwen3-1.7B" else shape_of(name)
    here = machine(1, 23.5, 64)
    setting = Setting(shape, shape, True, here)
    chosen = choose_memory(config, setting)
    needed = estimate(chosen, setting)
    if card == "refused":
        assert needed.shortages(chosen, here, REFUSE_ABOVE)
        return
    assert not needed.shortages(chosen, here, WARN_ABOVE)
    peaks = [needed.peak_bytes(memory) / 1e9 for memory in (Memory.DEVICE, Memory.HOST)]
    assert [f"{peak:.1f} GB" for peak in peaks] == [card, host]
    assert {key for key in OFFLOAD_OPTIONS if attrgetter(key)(chosen)} == OFFLOADED[offloaded]


def test_the_phases(tmp_path: Path) -> None:
    """Reading is the environment's search alone; both phases share algorithm and lengths."""
    reading = config_of(SCRIPT, tmp_path)
    searching = config_of(SCRIPT, tmp_path, PHASE="searching", MODEL="m")
    assert (reading.agent.name, reading.max_turns) == ("documents_first", 0)
    assert (searching.agent.name, searching.max_turns) == ("dialogue", 3)
    for config in (reading, searching):
        assert not [*problems(config)]
        assert config.algorithm.adv_estimator == "dr_grpo"
        assert config.actor_rollout_ref.rollout.n_agent == 16
    assert reading.trainer.default_local_dir != searching.trainer.default_local_dir


@pytest.mark.parametrize("variable", ["WEIGHTS", "PHASE"])
def test_an_unknown_choice_is_refused(variable: str, tmp_path: Path) -> None:
    """The message names the choices."""
    with pytest.raises(RuntimeError, match=f"^2: {variable}: got x, expected"):
        config_of(SCRIPT, tmp_path, **{variable: "x"})
