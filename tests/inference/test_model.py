"""From what a user names to a folder of weights."""

import logging
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers import AutoModelForCausalLM, AutoTokenizer

from example.tiny import tiny_model
from search_r1.inference.model import at_last_step, model_folder
from search_r1.inference.options import AgentOptions
from verl.checkpoint.folders import MARKER
from verl.errors import ModelError


def test_a_checkpoint_is_exported_for_the_while(tmp_path: Path) -> None:
    """The folder holds the checkpoint's weights and tokenizer, and is gone afterwards."""
    start = tiny_model(tmp_path / "start")
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    with torch.no_grad():
        model.model.norm.weight.add_(1.0)
    step = tmp_path / "global_step_3"
    weights = {f"actor.model.lm.{name}": tensor for name, tensor in model.state_dict().items()}
    dcp.save(weights, checkpoint_id=step / "shards", no_dist=True)
    model.config.save_pretrained(step / "huggingface")
    AutoTokenizer.from_pretrained(start).save_pretrained(step / "huggingface")
    (step / MARKER).touch()
    with model_folder(str(step), "float32") as folder:
        found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        assert AutoTokenizer.from_pretrained(folder).encode("a b") != []
    assert torch.equal(found.model.norm.weight, model.model.norm.weight)
    assert not folder.exists()


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    """Nothing is copied; a folder without a model is named."""
    (tmp_path / "config.json").write_text("{}")
    with model_folder(str(tmp_path), "float32") as folder:
        assert folder == tmp_path
    (tmp_path / "empty").mkdir()
    with (
        pytest.raises(ModelError, match=r"without config\.json"),
        model_folder(str(tmp_path / "empty"), "float32"),
    ):
        pass


def test_the_originals_checkpoints_are_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`run/actor/global_step_150` is a model as it stands; run and `actor/` mean the last one."""
    run = tmp_path / "nq-search-r1-ppo"
    for part in ("actor/global_step_50", "actor/global_step_150", "critic/global_step_300"):
        (run / part).mkdir(parents=True)
        (run / part / "config.json").touch()
        (run / part / "model.safetensors").touch()
    (run / "actor/global_step_200").mkdir()
    (run / "actor/global_step_200/config.json").touch()  # killed before the weights were written
    last = run / "actor" / "global_step_150"
    for named in (run, run / "actor", last):
        with caplog.at_level(logging.WARNING):
            options = at_last_step(AgentOptions(model=str(named)))
        with model_folder(options.model, "float32") as folder:
            assert folder == last
    assert [str(last) in message for message in caplog.messages] == [True, True]


def test_a_run_of_ours_means_its_last_complete_checkpoint(tmp_path: Path) -> None:
    """By number; what is unfinished is no step, and a folder without steps stays what it is."""
    for step in (9, 10, 11):
        (tmp_path / f"global_step_{step}").mkdir()
    for step in (9, 10):
        (tmp_path / f"global_step_{step}" / MARKER).touch()
    found = at_last_step(AgentOptions(model=str(tmp_path)))
    assert found.model == str(tmp_path / "global_step_10")
    for name in ("org/model", str(tmp_path / "global_step_9"), str(tmp_path / "none")):
        assert at_last_step(AgentOptions(model=name)).model == name
