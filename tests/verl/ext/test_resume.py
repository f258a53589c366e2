"""A run resumes from its own checkpoints; others are refused with every difference."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import writing
from verl.checkpoint import folders
from verl.config import Config
from verl.config.known import known_options
from verl.errors import ConfigError
from verl.ext.resume import check_resume, flat, identity
from verl.model_files import weights_fingerprint
from verl.preflight.undecided import fill_undecided, offload_everything

SERVED = {"corpus": "c1", "index": "i1", "encoder": "e1"}


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Config]:
    """A run whose first checkpoint is on disk."""
    config = Config()
    for name in ("train", "val"):
        (tmp_path / f"{name}.parquet").write_bytes(name.encode())
        setattr(config.data, f"{name}_files", str(tmp_path / f"{name}.parquet"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
    config.actor_rollout_ref.model.path = str(tmp_path / "model")
    config.trainer.default_local_dir = str(tmp_path / "run")
    config.trainer.resume_mode = "auto"
    config.algorithm.adv_estimator = "grpo"
    with writing(tmp_path / "run", 1) as folder:
        folders.write_state(folder, identity(config, SERVED))
    yield config


def differences(config: Config, served: dict[str, str] = SERVED) -> str:
    """Return the error of a resume; empty if the run may resume."""
    try:
        check_resume(config, identity(config, served))
    except ConfigError as error:
        return str(error)
    return ""


def set_option(config: Config, key: str, value: Any) -> None:
    *sections, name = key.split(".")
    target: Any = config
    for section in sections:
        target = getattr(target, section)
    setattr(target, name, value)


def test_the_same_run_may_resume_elsewhere(config: Config, tmp_path: Path) -> None:
    """Moved files with the same content, and other devices, are no difference."""
    for name in ("train", "val"):
        moved = tmp_path / "moved" / f"{name}.parquet"
        moved.parent.mkdir(exist_ok=True)
        Path(getattr(config.data, f"{name}_files")).rename(moved)
        setattr(config.data, f"{name}_files", str(moved))
    config.trainer.n_gpus_per_node, config.trainer.nnodes = 4, 2
    config.trainer.total_training_steps, config.trainer.save_freq = 999, 7
    config.retriever.url = "http://elsewhere:8000/retrieve"
    config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu = 1234
    assert differences(config) == ""


def test_another_offload_is_no_difference(config: Config, caplog: pytest.LogCaptureFixture) -> None:
    """A run on other devices may choose other offloading: neither refused nor logged."""
    for chosen in (offload_everything(config), fill_undecided(config)):
        assert differences(chosen) == ""
    assert caplog.text == ""


def test_switches_of_an_older_checkpoint_are_its_compat() -> None:
    """`compat` was a section of three switches; all of them were `compat=search_r1`."""
    switches = {"gae": False, "whiten": False, "validation": False}
    assert flat({"compat": switches}) == {"compat": "none"}
    assert flat({"compat": dict.fromkeys(switches, True)}) == {"compat": "search_r1"}


def test_an_unexpanded_home_in_a_checkpoint_is_no_difference(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older checkpoints stored paths with `~`: as values, in lists and in stages."""
    stage = {"name": "~/r.py:f", "steps": 3}
    monkeypatch.setenv("HOME", str(tmp_path))
    present, saved = identity(config, SERVED), identity(config, SERVED)
    for state, home in ((present, str(tmp_path)), (saved, "~")):
        state["config"]["template"] = f"{home}/own.yaml"
        state["config"]["agent"]["tools"] = ["search", f"{home}/my.py:Tool"]
        state["config"]["reward_model"]["stages"] = [{**stage, "name": f"{home}/r.py:f"}]
    with writing(Path(config.trainer.default_local_dir), 2) as folder:
        folders.write_state(folder, saved)
    check_resume(config, present)


@pytest.mark.parametrize("name", ["data", "validation", "model", "corpus", "index", "encoder"])
def test_other_content_is_refused_by_name_and_may_be_accepted(
    config: Config, tmp_path: Path, name: str
) -> None:
    """The error has the option that accepts each fingerprint; it accepts no other one."""
    files = {"data": "train.parquet", "validation": "val.parquet",
             "model": "model/model.safetensors"}  # fmt: skip
    served = {**SERVED, name: "other"} if name in SERVED else SERVED
    if name in files:
        (tmp_path / files[name]).write_bytes(b"something else")
    text = differences(config, served)
    assert f"- {name}: got" in text
    assert text.count("\n") == 1
    assert f"trainer.resume_anyway=[{name}]" in text
    config.trainer.resume_anyway = ["seed" if name == "data" else "data"]
    assert f"- {name}: got" in differences(config, served)
    config.trainer.resume_anyway = [name]
    assert differences(config, served) == ""


@pytest.mark.parametrize("name", ["model", "critic"])
def test_weights_are_compared_in_the_way_of_the_checkpoint(config: Config, name: str) -> None:
    """Checkpoints of before 2026-11-30 have another fingerprint of the same weights."""
    path = config.actor_rollout_ref.model.path
    if name == "critic":
        config.critic.model.path = path
    saved = identity(config, SERVED)
    saved["fingerprints"][name] = weights_fingerprint(path, "of before")
    with writing(Path(config.trainer.default_local_dir), 2) as folder:
        folders.write_state(folder, saved)
    assert saved["fingerprints"][name] not in identity(config, SERVED)["fingerprints"].values()
    assert differences(config) == ""
    Path(path, "model.safetensors").write_bytes(b"weighty")
    assert f"- {name}: got" in differences(config)


def test_another_experiment_is_refused_with_every_difference(config: Config) -> None:
    """All differing options are listed at once and can be accepted individually."""
    config.trainer.seed, config.max_turns = 5, 4
    config.reward_model.weights = {"em": 1.0}
    text = differences(config)
    assert "trainer.seed: got 5, the checkpoint has 0" in text
    assert "max_turns: got 4, the checkpoint has 2" in text
    assert "reward_model.weights" in text
    config.trainer.resume_anyway = ["trainer.seed", "max_turns"]
    text = differences(config)
    assert "trainer.seed" not in text.replace("[trainer.seed,max_turns", "")
    assert "reward_model.weights" in text


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data.train_batch_size", 8),
        ("actor_rollout_ref.model.lora_rank", 16),
        ("algorithm.adv_estimator", "gae"),
    ],
)
def test_options_that_the_saved_state_does_not_fit_are_never_accepted(
    config: Config, key: str, value: Any
) -> None:
    """Another data order, adapter, or a critic that was not saved cannot be accepted."""
    set_option(config, key, value)
    config.trainer.resume_anyway = [key]
    assert f"{key}: got" in differences(config)
    assert "cannot be used with another value" in differences(config)


def test_a_changed_learning_rate_is_logged_and_used(
    config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    """The guard advises a lower rate after a collapse, so it must not be refused."""
    config.actor_rollout_ref.actor.optim.lr = 1e-7
    assert differences(config) == ""
    assert "actor_rollout_ref.actor.optim.lr: got 1e-07, the checkpoint has 1e-06" in caplog.text
    config.trainer.compute_dtype = "float32"
    assert differences(config) == ""
    assert 'trainer.compute_dtype: got "float32", the checkpoint has "auto"' in caplog.text


def test_a_missing_fingerprint_is_logged(config: Config, caplog: pytest.LogCaptureFixture) -> None:
    """If an older checkpoint lacks it; but if the retriever no longer reports it, it is refused."""
    assert differences(config, {**SERVED, "tokenizer": "t1"}) == ""
    assert "tokenizer: got t1, the checkpoint has None" in caplog.text
    text = differences(config, {})
    assert all(f"- {name}: got None, the checkpoint has" in text for name in SERVED)


def test_a_new_run_is_compared_with_nothing(config: Config) -> None:
    """`disable`, and a folder without checkpoint, allow any options."""
    config.trainer.seed = 9
    own = dataclasses.replace(config.trainer, default_local_dir="nowhere")
    assert differences(dataclasses.replace(config, trainer=own)) == ""
    config.trainer.resume_mode = "disable"
    assert differences(config) == ""


@pytest.mark.parametrize("key", known_options())
def test_every_option_is_compared_as_its_field_says(
    config: Config, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The four kinds: always refused, refused until accepted, logged, or neither."""
    kind, option = known_options()[key].limits.resume, known_options()[key]
    present = identity(config, SERVED)
    *sections, name = key.split(".")
    section = present["config"]
    for part in sections:
        section = section[part]
    section[name] = "gae" if key == "algorithm.adv_estimator" else f"not {option.default}"
    try:
        check_resume(config, present)
        refusal = ""
    except ConfigError as error:
        refusal = str(error)
    assert (f"- {key}: got" in refusal) == (kind in ("fixed", "experiment"))
    assert (f"resuming with another {key}: got" in caplog.text) == (kind == "logged")
    if kind == "experiment" and key != "algorithm.adv_estimator":
        config.trainer.resume_anyway = [key]
        check_resume(config, present)


def test_options_about_the_machine_may_differ() -> None:
    """Other devices are never refused, also with options that are added to these sections."""
    kinds = {key: option.limits.resume for key, option in known_options().items()}
    assert set(flat(dataclasses.asdict(Config()))) == set(kinds)
    devices = ("actor_rollout_ref.actor.fsdp_config", "critic.model.fsdp_config", "trainer.guard")
    assert {kind for key, kind in kinds.items() if key.startswith(devices)} == {"free"}
    assert kinds["data.train_batch_size"] == "fixed"
    assert kinds["trainer.seed"] == kinds["max_turns"] == "experiment"
