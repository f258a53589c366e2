"""Resolving `--model` and `--adapter` to a model folder."""

import asyncio
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers import AutoModelForCausalLM, AutoTokenizer

from search_r1.inference import model as inference_model
from search_r1.inference.agent_options import AgentOptions
from search_r1.inference.building import checked_agent, run_config
from search_r1.inference.model import (
    model_folder,
    open_model_folder,
)
from search_r1.inference.model_name import at_latest_checkpoint
from tests.bad_models import NORM, entry, gone, weights, whole_model
from verl.checkpoint.exporting import export
from verl.checkpoint.folders import MARKER, write_state
from verl.config import Config
from verl.errors import ConfigError, ModelError
from verl.rollout.interface import build_engine


def test_a_checkpoint_is_exported_for_the_while(tmp_path: Path) -> None:
    """The folder has the checkpoint's weights and tokenizer, and is deleted afterwards."""
    start = whole_model(tmp_path / "start")
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    with torch.no_grad():
        model.model.norm.weight.add_(1.0)
    step = tmp_path / "global_step_3"
    weights = {f"actor.model.lm.{name}": tensor for name, tensor in model.state_dict().items()}
    dcp.save(weights, checkpoint_id=step / "shards", no_dist=True)
    model.config.save_pretrained(step / "huggingface")
    AutoTokenizer.from_pretrained(start).save_pretrained(step / "huggingface")
    write_state(step, {"config": {}})
    (step / MARKER).touch()
    with model_folder(str(step), "float32") as folder:
        found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        assert AutoTokenizer.from_pretrained(folder).encode("a b") != []
    assert torch.equal(found.model.norm.weight, model.model.norm.weight)
    assert not folder.exists()


def test_a_quantized_model_is_not_merged_with_an_adapter(tmp_path: Path) -> None:
    """The sum would be another one than the adapter was trained in; the model alone may sample."""
    model = whole_model(tmp_path / "model")
    entry("config.json", "quantization_config", {"quant_method": "awq"})(model)
    with model_folder(str(model), "float32") as folder:
        assert folder == model
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    entry_file = {"base_model_name_or_path": str(model), "peft_type": "LORA"}
    (adapter / "adapter_config.json").write_text(json.dumps(entry_file))
    merged = model_folder(str(model), "float32", str(adapter))
    with pytest.raises(ModelError, match="--model: got"), merged:
        pass


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda lm: lm.model.norm.weight.fill_(torch.nan), "NaN or infinite .* model.norm.weight"),
        (lambda lm: lm.model.norm.weight.fill_(1e39), "NaN or infinite .* model.norm.weight"),
        (lambda lm: setattr(lm.config, "num_hidden_layers", 4), "missing model.layers.2"),
        (lambda lm: setattr(lm.config, "num_hidden_layers", 1), "unexpected model.layers.1"),
    ],
)
def test_a_checkpoint_that_is_no_model_is_not_exported(
    change: Callable[[Any], object], words: str, tmp_path: Path
) -> None:
    """A failed export leaves no output folder behind."""
    lm = AutoModelForCausalLM.from_pretrained(whole_model(tmp_path / "start"), dtype=torch.float64)
    with torch.no_grad():
        change(lm)
    step = tmp_path / "global_step_3"
    weights = {f"actor.model.lm.{name}": tensor for name, tensor in lm.state_dict().items()}
    dcp.save(weights, checkpoint_id=step / "shards", no_dist=True)
    lm.config.save_pretrained(step / "huggingface")
    (step / MARKER).touch()
    with pytest.raises(ModelError, match=words) as caught:
        export(step, tmp_path / "out", dtype="float32")
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    """A model folder is used without a copy; a folder without a model is refused."""
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
    """The original's checkpoints are model folders; its run folder means the latest checkpoint."""
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
            options = at_latest_checkpoint(AgentOptions(model=str(named)))
        with model_folder(options.model, "float32") as folder:
            assert folder == last
    assert [str(last) in message for message in caplog.messages] == [True, True]


def test_a_run_of_ours_means_its_last_complete_checkpoint(tmp_path: Path) -> None:
    """The highest complete step is used; folders without steps are left as they are."""
    for step in (9, 10, 11):
        (tmp_path / f"global_step_{step}").mkdir()
    for step in (9, 10):
        (tmp_path / f"global_step_{step}" / MARKER).touch()
    found = at_latest_checkpoint(AgentOptions(model=str(tmp_path)))
    assert found.model == str(tmp_path / "global_step_10")
    for name in ("org/model", str(tmp_path / "global_step_9"), str(tmp_path / "none")):
        assert at_latest_checkpoint(AgentOptions(model=name)).model == name


def config_for(path: Path, engine: str = "transformers") -> Config:
    """Return a configuration that loads an agent from a folder."""
    options = AgentOptions(model=str(path), retriever_url="empty", device="cpu", engine=engine,
                           template="search_r1")  # type: ignore[arg-type]  # fmt: skip
    return run_config(options, str(path))


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_a_bad_model_is_refused_before_any_engine(engine: str, tmp_path: Path) -> None:
    """Missing weights and NaN values are refused for every engine."""
    path = whole_model(tmp_path / "model")
    checked_agent(config_for(path, engine))
    entry("config.json", "num_hidden_layers", 4)(path)
    with pytest.raises(ModelError, match=r"--model: got .* \(weights: missing model.layers.2"):
        checked_agent(config_for(path, engine))
    entry("config.json", "num_hidden_layers", 2)(path)
    weights(lambda x: x[NORM].fill_(torch.nan))(path)
    with pytest.raises(ModelError, match=r"NaN or infinite values in model\.norm\.weight"):
        checked_agent(config_for(path, engine))
        asyncio.run(build_engine(config_for(path, engine)).start())


def test_an_endpoint_needs_a_tokenizer_alone(tmp_path: Path) -> None:
    """The weights may be missing, but tokenizer and chat template are checked."""
    path = whole_model(tmp_path / "model")
    gone("model*")(path)
    config = config_for(path)
    config.actor_rollout_ref.rollout.name = "remote"
    checked_agent(config)
    (path / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    with pytest.raises(ModelError, match="TemplateError"):
        checked_agent(config)


def test_a_dialogue_longer_than_the_model_is_refused(tmp_path: Path) -> None:
    """The error, before any engine starts, has the allowed length; endpoints are not checked."""
    folder = str(whole_model(tmp_path / "model"))  # of 8192 positions
    for length, endpoint in ((7692, None), (7693, None), (7693, "http://host")):
        options = AgentOptions(model=folder, max_prompt_length=length, endpoint=endpoint,
                               device="cpu", max_response_length=500)  # fmt: skip
        if length == 7693 and endpoint is None:
            with pytest.raises(ConfigError, match=r"8192 together.* at most 7692 here"):
                checked_agent(run_config(options, folder))
        else:
            checked_agent(run_config(options, folder))


@pytest.mark.parametrize("endpoint", [None, "http://127.0.0.1:1/v1"])
def test_no_weights_are_fetched_for_an_endpoint(
    endpoint: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only tokenizer files are downloaded if an endpoint generates."""
    asked: list[str] = []

    def fetch(name: str, allow_patterns: list[str]) -> str:
        asked.extend(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(inference_model, "snapshot_download", fetch)
    with open_model_folder(AgentOptions(model="org/name", endpoint=endpoint)) as folder:
        assert folder == tmp_path
    assert ("*.safetensors" in asked) is (endpoint is None) and "*.json" in asked
