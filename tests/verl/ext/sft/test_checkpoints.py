"""An interrupted supervised run continues bit for bit, and only with the same settings."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.verl.ext.sft.test_run import demonstrations, model, no_torchrun, options
from verl.checkpoint.exporting import export
from verl.checkpoint.folders import all_complete
from verl.errors import ConfigError, SaveError
from verl.ext.sft import run as sft
from verl.ext.sft.checkpoints import settings
from verl.ext.sft.options import parse
from verl.model_files import weights_fingerprint

__all__ = ["demonstrations", "model", "no_torchrun"]
pytestmark = pytest.mark.usefixtures("no_torchrun")
ADAPTER = ["lora_rank=2", "target_modules=[q_proj,up_proj]"]


def arguments(model: str, rows: str, out: Path, *more: str) -> list[str]:
    """Options with everything that a checkpoint must carry: shuffling, schedule, warm-up."""
    shaped = ["steps=6", "shuffle=true", "seed=3", "schedule=cosine", "warmup_steps=2", "lr=1e-2"]
    return [*options(model, rows, out), *shaped, *more]


def stop_after(steps: int, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Train, and be interrupted in the step after `steps`."""
    calls, whole = iter(range(steps)), sft.train_step

    def step(*arguments: object) -> object:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return whole(*arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(sft, "train_step", step)
        sft.train(parse(words))


def assert_same(found: Path, expected: Path) -> None:
    for file in expected.glob("*.safetensors"):
        ours, theirs = load_file(found / file.name), load_file(file)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("more", [[], ADAPTER], ids=["all weights", "adapter"])
def test_an_interrupted_run_continues_bit_for_bit(
    more: list[str],
    model: str,
    demonstrations: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Weights, adapter and losses equal those of an undisturbed run; so does an export."""
    losses = sft.train(parse(arguments(model, demonstrations, tmp_path / "whole", *more)))
    words = arguments(model, demonstrations, tmp_path / "cut", *more, "save_freq=2")
    stop_after(3, words, monkeypatch)
    assert not (tmp_path / "cut").exists()
    assert sft.train(parse(words)) == losses[2:]
    assert_same(tmp_path / "cut", tmp_path / "whole")
    saved = all_complete(tmp_path / "cut.checkpoints")
    assert [folder.name for folder in saved] == [f"global_step_{n}" for n in (2, 4, 6)]
    assert_same(export(saved[-1], tmp_path / "out", dtype="float32"), tmp_path / "whole")
    if more:
        assert_same(tmp_path / "cut" / "adapter", tmp_path / "whole" / "adapter")
        alone = export(saved[-1], tmp_path / "alone", adapter_only=True)
        assert_same(alone, tmp_path / "whole" / "adapter")
    assert sft.train(parse([*words, "save_dtype=float16"])) == []  # finished: only written again


@pytest.mark.parametrize(
    "changed", ["lr=2e-2", "steps=7", "seed=4", "lora_rank=2", "train_file", "model_path"]
)
def test_other_settings_are_refused_by_name(
    changed: str,
    model: str,
    demonstrations: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also another content of a file; without `save_freq`, checkpoints are left alone."""
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(Path(demonstrations).read_bytes())
    words = arguments(model, str(rows), tmp_path / "out", "save_freq=1")
    stop_after(1, words, monkeypatch)
    if changed == "train_file":
        rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:2]))
    elif changed == "model_path":
        monkeypatch.setattr("verl.ext.sft.checkpoints.weights_fingerprint", lambda *_: "other")
    else:
        words.append(changed)
    with pytest.raises(ConfigError, match=f"got {changed.partition('=')[0]}=.*global_step_1"):
        sft.train(parse(words))


def test_weights_are_compared_in_the_way_of_the_checkpoint(
    model: str, demonstrations: str, tmp_path: Path
) -> None:
    """Checkpoints of before 2026-11-30 have another fingerprint of the same weights."""
    config = parse(arguments(model, demonstrations, tmp_path / "out"))
    saved = {**settings(config), "model_path": weights_fingerprint(model, "of before")}
    assert settings(config) != settings(config, saved) == saved


def test_a_checkpoint_that_cannot_be_written_ends_the_run(
    model: str, demonstrations: str, tmp_path: Path
) -> None:
    """With an error that names the folder; no model appears."""
    (tmp_path / "out.checkpoints").write_text("a file")
    words = arguments(model, demonstrations, tmp_path / "out", "save_freq=1")
    with pytest.raises(SaveError, match="checkpoint of step 1"):
        sft.train(parse(words))
    assert not (tmp_path / "out").exists()
