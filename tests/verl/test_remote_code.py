"""Code in a model's folder runs only with trust_remote_code, and nothing prompts at a terminal."""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from search_r1 import cli
from search_r1.infer import InferOptions
from search_r1.inference.building import run_config
from search_r1.retrieval.encoders.cross_encoder import CrossEncoder
from search_r1.retrieval.encoders.families import family_of
from search_r1.retrieval.encoders.loading import explain_load_errors
from search_r1.retrieval.encoders.sentence import SentenceEncoder
from search_r1.retrieval.settings import EncoderConfig, RerankConfig
from verl.checkpoint import __main__ as checkpoint
from verl.checkpoint import folders
from verl.config import Config, ModelConfig
from verl.errors import UserError
from verl.ext.lora.roles import expected_record
from verl.ext.model_shape import read_shape
from verl.ext.sft import run as sft
from verl.ext.sft.options import parse
from verl.model_files import load_tokenizer, read_config
from verl.remote_code import TRUST, set_trust
from verl.rollout.vllm_settings import VllmSettings
from verl.training.loading import load_causal_lm, map_causal_lm

CODE = """
from pathlib import Path
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizer
Path({acted!r}).touch()
class Config(PretrainedConfig):
    model_type = "own"
class Model(PreTrainedModel):
    config_class = Config
class Tokenizer(PreTrainedTokenizer):
    pass
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose config, model and tokenizer are defined by code in it."""

    def refuse_prompt(prompt: str = "") -> str:
        raise AssertionError(f"prompted: {prompt}")

    monkeypatch.setattr(builtins, "input", refuse_prompt)
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    monkeypatch.setenv(TRUST, "0")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "own.py").write_text(CODE.format(acted=str(tmp_path / "acted")))
    kinds = {"AutoConfig": "own.Config", "AutoModel": "own.Model",
             "AutoModelForCausalLM": "own.Model", "AutoTokenizer": ["own.Tokenizer", None],
             "AutoModelForSequenceClassification": "own.Model"}  # fmt: skip
    config = {"model_type": "own", "architectures": ["Model"], "auto_map": kinds}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = {"tokenizer_class": "Tokenizer", "auto_map": kinds}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return folder


def fine_tune(path: str) -> object:
    return sft.train(parse([f"model_path={path}", "train_file=x", f"output_dir={path}.out"]))


def export(path: str) -> object:
    """Export a checkpoint whose config and tokenizer are those of the folder."""
    step_dir = Path(path).with_name("global_step_1")
    (step_dir / "shards").mkdir(parents=True)
    (step_dir / folders.MARKER).touch()
    Path(path).rename(step_dir / "huggingface")
    return checkpoint.main(["export", str(step_dir), "--out", f"{path}.out"])


def ask(path: str) -> object:
    return cli.main(["infer", "q", "--model", path, "--retriever-url", "empty"])


def encode(path: str) -> object:
    with explain_load_errors("retriever_model", path):
        return SentenceEncoder(path, family_of("e5"), EncoderConfig(), None)


LOADERS: list[Callable[[str], object]] = [
    read_config,
    load_tokenizer,
    load_causal_lm,
    lambda path: map_causal_lm(path, torch.float32, True),
    lambda path: expected_record("model", ModelConfig(lora_rank=1), path),
    fine_tune,
    encode,
    lambda path: CrossEncoder.open(RerankConfig(reranker_model=path)),
]


@pytest.mark.parametrize("load", LOADERS)
def test_code_of_a_model_does_not_run(
    model: Path, tmp_path: Path, load: Callable[[str], object]
) -> None:
    """Each loader refuses with an error that names the option, without a prompt."""
    with pytest.raises(UserError, match=r"trust[_-]remote[_-]code") as caught:
        load(str(model))
    assert not (tmp_path / "acted").exists() and not (tmp_path / "modules").exists()
    assert "fix:" in str(caught.value) or "set --" in str(caught.value)


@pytest.mark.parametrize("command", [export, ask])
def test_commands_do_not_run_the_code(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    command: Callable[[str], object],
) -> None:  # fmt: skip
    """They end with status 2 and an error that names the option."""
    try:
        status = command(str(model))
    except SystemExit as error:
        status = error.code
    assert status == 2 and "trust_remote_code" in capsys.readouterr().err
    assert not (tmp_path / "acted").exists()


def test_a_memory_estimate_does_not_run_the_code(model: Path, tmp_path: Path) -> None:
    """A model that cannot be read has no shape."""
    assert read_shape(str(model)) is None
    assert not (tmp_path / "acted").exists()


def test_a_memory_estimate_does_not_prompt_if_code_is_trusted(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run with trust_remote_code does not wait at a terminal for the same answer."""
    prompts: list[str] = []
    monkeypatch.setattr(builtins, "input", prompts.append)
    set_trust(True)
    assert read_shape(str(model)) is None
    assert prompts == []


def test_the_option_allows_the_code_to_run(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code runs in this process, in its children, and in vLLM."""
    config = Config()
    config.actor_rollout_ref.model.path = str(model)
    assert VllmSettings(config).arguments()["trust_remote_code"] is False
    monkeypatch.setenv(TRUST, "")
    set_trust(True)
    assert type(read_config(str(model))).__module__.startswith("transformers_modules")
    assert (tmp_path / "acted").exists()
    assert VllmSettings(config).arguments()["trust_remote_code"] is True


def test_tools_named_by_a_model_are_not_loaded_from_files(model: Path) -> None:
    """Without the option, a model's settings cannot name code files."""
    (model / "search_r1.json").write_text(json.dumps({"tools": ["/x/evil.py:Tool"]}))
    with pytest.raises(UserError, match="trust-remote-code"):
        run_config(InferOptions(), str(model))
    trusting = InferOptions(trust_remote_code=True)
    assert run_config(trusting, str(model)).agent.tools == ["/x/evil.py:Tool"]
