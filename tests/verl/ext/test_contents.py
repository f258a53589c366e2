"""Checkpoint files that are damaged, foreign or malicious: one error line, no code is executed."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import LlamaConfig

from tests.bad_models import entry, whole_model
from tests.checkpoints import writing
from tests.test_end_to_end import write_rows
from verl.checkpoint import folders
from verl.checkpoint.exporting import export
from verl.config import Config
from verl.errors import ModelError, UserError
from verl.ext.resume import check_contents
from verl.trainer import main_ppo, run
from verl.training.checkpoint_files import (
    load_tensors,
    random_states,
    read_driver_random,
    read_state_file,
    write_driver_random,
)
from verl.training.shards import RECORDS_FILE

STATE = {"step": 3, "sampler": {"epoch": 0}, "kl_coef": 0.1, "config": {}, "fingerprints": {}}
WEIGHTS = {"actor.model.lm.w": torch.arange(600.0).reshape(60, 10), "actor.optim.m": torch.ones(7)}
FILES = ("trainer_state.json", "ranks/driver.pt", "ranks/rank_0.pt", "shards/.metadata",
         "shards/__0_0.distcp", folders.MARKER)  # fmt: skip


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as one rank and the driver write it."""
    root = tmp_path_factory.mktemp("sound")
    with writing(root, 3) as part:
        folders.write_state(part, STATE)
        write_driver_random(part)
        states = {"schedules": {"actor": {"last_epoch": 3}}, "random": random_states()}
        torch.save(states, part / "ranks/rank_0.pt")
        LlamaConfig().save_pretrained(part / "huggingface")
        save({name: x.clone() for name, x in WEIGHTS.items()}, checkpoint_id=part / "shards",
             no_dist=True)  # fmt: skip
    return folders.step_folder(root, 3)


class Attack:
    """Creates a file in the working folder when it is unpickled."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("acted"),)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x40
    path.write_bytes(content)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def dangling_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def torch_pickle(path: Path) -> None:
    with path.open("wb") as file:
        torch.save({"random": Attack()}, file)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut off": lambda path: os.truncate(path, path.stat().st_size // 3),
    "empty": lambda path: path.write_bytes(b""),
    "a folder": replace_by_folder,
    "missing": Path.unlink,
    "text": lambda path: path.write_text("<html>404</html>\n" * 9),
    "a list": lambda path: path.write_text("[1, 2]"),
    "noise": lambda path: path.write_bytes(bytes(range(256)) * 40),
    "a pickle": lambda path: path.write_bytes(pickle.dumps(Attack())),
    "torch's pickle": torch_pickle,
    "a dangling link": dangling_link,
}


def refusal(step_dir: Path) -> str:
    """Return the error of reading a checkpoint as a resumed run does; empty if there is none."""
    config = Config()
    config.trainer.resume_mode = str(step_dir)
    try:
        check_contents(config)
        load_tensors({name: x.clone() for name, x in WEIGHTS.items()}, step_dir / "shards", True)
        read_driver_random(step_dir)
        read_state_file(step_dir / "ranks/rank_0.pt")
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("is_listed", [True, False])
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", FILES)
def test_no_damaged_file_is_resumed_from(
    sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    file: str, damage: str, is_listed: bool,
) -> None:  # fmt: skip
    """Each file, damaged in each way, gives one line that names it; none of its code is executed.

    Older checkpoints list no files in their marker, and may lack the driver's random states.
    """
    monkeypatch.chdir(tmp_path)
    step_dir = Path(shutil.copytree(sound, tmp_path / "global_step_3"))
    if not is_listed:
        (step_dir / folders.MARKER).write_text("3\n")
    DAMAGES[damage](step_dir / file)
    text = refusal(step_dir)
    if not is_listed and file == "ranks/driver.pt" and not (step_dir / file).exists():
        assert text == ""
    else:
        assert "got" in text and "fix:" in text and "\n" not in text
    assert not (tmp_path / "acted").exists()
    if file.startswith("shards"):
        with pytest.raises(UserError):
            export(step_dir, tmp_path / "out")
        assert not (tmp_path / "acted").exists()


def test_a_sound_checkpoint_is_read(sound: Path, tmp_path: Path) -> None:
    """It is read with and without a list of files in its marker, and after being moved."""
    step_dir = Path(shutil.copytree(sound, tmp_path / "global_step_3"))
    assert refusal(step_dir) == ""
    (step_dir / folders.MARKER).write_text("3\n")
    assert refusal(step_dir) == ""
    loaded = {name: torch.zeros_like(x) for name, x in WEIGHTS.items()}
    load_tensors(loaded, step_dir / "shards", alone=True)
    assert all(torch.equal(loaded[name], x) for name, x in WEIGHTS.items())
    assert read_state_file(step_dir / "ranks/rank_0.pt").keys() == {"schedules", "random"}


@pytest.mark.parametrize("file", [name for name in FILES if name != folders.MARKER])
def test_a_flipped_bit_is_found(sound: Path, tmp_path: Path, file: str) -> None:
    """In any file that is listed with its content, and so in all but large shards."""
    step_dir = Path(shutil.copytree(sound, tmp_path / "global_step_3"))
    flip(step_dir / file)
    assert "changed since it was written" in refusal(step_dir)


@pytest.mark.parametrize(
    "change",
    [
        {"step": 4}, {"step": "three"}, {"step": None}, {"sampler": []}, {"sampler": "x"},
        {"kl_coef": None}, {"kl_coef": "much"}, {"kl_coef": float("nan")}, {"kl_coef": []},
        {"others": 5}, {"best": "x"}, {"pending": [1]}, {"score": "high"}, {"version": "x"},
    ],
)  # fmt: skip
def test_a_state_of_other_types_is_refused(
    sound: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    """It would make the driver fail after all engines have started."""
    step_dir = Path(shutil.copytree(sound, tmp_path / "global_step_3"))
    (step_dir / folders.MARKER).write_text("3\n")
    folders.write_state(step_dir, {**STATE, **change})
    assert "trainer_state.json: got" in refusal(step_dir)


def bytes_for_a_tensor(metadata: Any, shards: Path) -> None:
    metadata.state_dict_metadata["actor.optim.m"] = BytesStorageMetadata()


def another_folder(metadata: Any, shards: Path) -> None:
    torch.save(Attack(), shards.parent / "outside")
    for location in metadata.storage_data.values():
        location.relative_path = "../outside"


def another_tensor(metadata: Any, shards: Path) -> None:
    del metadata.state_dict_metadata["actor.optim.m"]


def another_size(metadata: Any, shards: Path) -> None:
    entry = metadata.state_dict_metadata["actor.optim.m"]
    entry.size = entry.chunks[0].sizes = torch.Size([6])


def no_metadata(metadata: Any, shards: Path) -> None:
    metadata.state_dict_metadata = 5


@pytest.mark.parametrize(
    "forge",
    [bytes_for_a_tensor, another_folder, another_tensor, another_size, no_metadata],
)
def test_a_forged_table_of_tensors_is_refused(
    sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forge: Callable[[Any, Path], None]
) -> None:
    """Objects that torch would unpickle, files elsewhere, and other tensors."""
    monkeypatch.chdir(tmp_path)
    step_dir = Path(shutil.copytree(sound, tmp_path / "global_step_3"))
    (step_dir / folders.MARKER).write_text("3\n")
    metadata = FileSystemReader(step_dir / "shards").read_metadata()
    forge(metadata, step_dir / "shards")
    (step_dir / "shards/.metadata").write_bytes(pickle.dumps(metadata))
    assert "\n" not in refusal(step_dir) and "fix:" in refusal(step_dir)
    assert not (tmp_path / "acted").exists()


@pytest.mark.parametrize("content", ["[1]", "{", '{"actor": 5}', '{"actor": {}}'])
def test_damaged_adapters_are_refused(sound: Path, tmp_path: Path, content: str) -> None:
    """The export needs the adapters and refuses damaged ones."""
    step_dir = Path(shutil.copytree(sound, tmp_path / "global_step_3"))
    (step_dir / RECORDS_FILE).write_text(content)
    with pytest.raises(UserError, match=RECORDS_FILE):
        export(step_dir, tmp_path / "out")


def test_an_earlier_checkpoint_is_named(sound: Path, tmp_path: Path) -> None:
    """The error of a damaged newest checkpoint names an earlier one to resume from."""
    for step in (2, 3):
        shutil.copytree(sound, tmp_path / f"global_step_{step}")
    (tmp_path / "global_step_3/ranks/rank_0.pt").write_bytes(b"")
    config = Config()
    config.trainer.resume_mode, config.trainer.default_local_dir = "auto", str(tmp_path)
    with pytest.raises(UserError, match=r"resume_mode=.*/global_step_2\)"):
        check_contents(config)
    assert json.loads((tmp_path / "global_step_2" / folders.MARKER).read_text())["files"]


def test_a_damaged_checkpoint_is_reported_before_any_work(
    sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command ends with status 2 and one line, before Ray is started."""
    monkeypatch.setattr(run, "start_ray", None)
    rows = tmp_path / "rows.parquet"
    write_rows(rows)
    model = whole_model(tmp_path / "model")
    step_dir = Path(shutil.copytree(sound, tmp_path / "run/global_step_3"))
    os.truncate(step_dir / "shards/__0_0.distcp", 100)
    status = main_ppo.main([
        f"data.train_files={rows}", f"data.val_files={rows}", "data.train_batch_size=2",
        f"actor_rollout_ref.model.path={model}", "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.rollout.n_agent=2",
        "retriever.url=empty", "trainer.device=cpu", "trainer.n_gpus_per_node=1",
        f"trainer.default_local_dir={tmp_path / 'run'}", "trainer.resume_mode=auto",
    ])  # fmt: skip
    text = capsys.readouterr().err.splitlines()[-1]
    assert status == 2 and text.startswith(f"checkpoint {step_dir}"), text
    assert "shards/__0_0.distcp is missing or has changed since it was written" in text


def test_a_quantized_base_does_not_describe_an_export(sound: Path, tmp_path: Path) -> None:
    """Its config.json would say that the exported weights are quantized."""
    step_dir = Path(shutil.copytree(sound, tmp_path / "global_step_3"))
    base = whole_model(tmp_path / "base")
    entry("config.json", "quantization_config", {"quant_method": "mxfp4"})(base)
    with pytest.raises(ModelError, match="--base: got"):
        export(step_dir, tmp_path / "out", base=str(base))
