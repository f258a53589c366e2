"""What is stored beside a trained policy: every option that changes what its dialogues are."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from search_r1.inference.agent_options import InferenceOptions
from search_r1.inference.building import run_config
from tests.verl.trainer.recording import build_trainer, grpo_config, hook_of
from verl.agent.settings import SETTINGS, DialogueSettings, get_option, set_option
from verl.checkpoint import exporting
from verl.config import Config
from verl.config.known import known_options
from verl.trainer.export import Export
from verl.trainer.hooks import joined_writer

OTHERS = {
    "which rows, how many at once": (
        "data.train_files", "data.val_files", "data.train_data_num", "data.val_data_num",
        "data.filter", "data.weight_column", "data.train_batch_size", "data.val_batch_size",
        "data.shuffle_train_dataloader", "data.rollouts", "data.rescore",
    ),
    "from scores to updates": (
        "algorithm.adv_estimator", "algorithm.gamma", "algorithm.lam",
        "algorithm.norm_adv_by_std_in_grpo", "algorithm.kl_penalty", "algorithm.kl_ctrl.",
        "algorithm.filter_groups.", "algorithm.overlong_buffer.", "algorithm.outcome_gate",
        "reward_model.name", "reward_model.weights", "reward_model.stages", "reward_model.scores",
        "reward_model.judge", "compat", "actor_rollout_ref.actor.", "actor_rollout_ref.ref.",
        "critic.",
    ),
    "weights, and where and how fast engines sample; inference has flags of its own": (
        "actor_rollout_ref.model.", "actor_rollout_ref.rollout.", "trainer.",
    ),
    "documents are from wherever the user says": (
        "retriever.url", "retriever.timeout", "retriever.max_retries", "retriever.deadline",
        "retriever.max_outage",
    ),
}  # fmt: skip
"""Options that change nothing of a dialogue with given weights; a prefix ends with a dot."""
CHANGED = {
    "agent.name": "documents_first", "agent.tools": ["visit", "search"], "template": "short",
    "max_turns": 5, "do_search": False, "retriever.topk": 7,
    "data.chat_template_kwargs": {"enable_thinking": False}, "algorithm.no_think_rl": True,
    "data.max_start_length": 11, "data.max_prompt_length": 12, "data.max_response_length": 13,
    "data.max_obs_length": 14, "reward_model.normalize": "unicode",
}  # fmt: skip


def changed_config() -> Config:
    """Return options of which each that is stored differs from its default."""
    config = Config()
    for key, value in CHANGED.items():
        assert get_option(config, key) != value
        set_option(config, key, value)
    return config


def test_every_option_is_stored_or_known_to_change_no_dialogue() -> None:
    """A new option has to be put into `SETTINGS`, or into one of the lists above."""
    names = [name for group in OTHERS.values() for name in group]
    prefixes = tuple(name for name in names if name.endswith("."))
    undecided = [
        key
        for key in known_options()
        if (key in SETTINGS) + (key in names or key.startswith(prefixes)) != 1
    ]
    assert undecided == [] and CHANGED.keys() == SETTINGS.keys()


def test_inference_has_every_stored_option(tmp_path: Path) -> None:
    """What training writes is what inference runs with; flags come first."""
    DialogueSettings(changed_config(), {}).write(tmp_path)
    config = run_config(InferenceOptions(model="m"), str(tmp_path))
    assert {key: get_option(config, key) for key in SETTINGS} == CHANGED
    given = InferenceOptions(
        model="m", agent="dialogue", tools=("search",), template="search_r1", max_turns=2, topk=3,
        chat_template_kwargs={}, no_think_rl=False, max_start_length=2048, max_prompt_length=4096,
        max_response_length=500, max_obs_length=500,
    )  # fmt: skip
    config, default = run_config(given, str(tmp_path)), Config()
    differing = [key for key in SETTINGS if get_option(config, key) != get_option(default, key)]
    assert differing == ["reward_model.normalize"], "--tools alone also turns the tools on"
    is_off = InferenceOptions(model="m", tools=("search",), do_search=False)
    assert run_config(is_off, str(tmp_path)).do_search is False


@pytest.mark.parametrize("name", ["file.py:Own", "openenv:http://ann:secret@host:1", "python:Own"])
def test_an_agent_with_an_address_is_stored(name: str, tmp_path: Path) -> None:
    """A file's path is absolute; secrets are not written."""
    config = Config()
    config.agent.name = name
    stored = DialogueSettings(config, {}).values["agent"]
    assert stored.partition(":")[0].endswith(name.partition(":")[0]) and "secret" not in stored
    assert not name.startswith("file") or Path(stored.partition(":")[0]).is_absolute()


def test_what_tools_store_replaces_nothing() -> None:
    """A tool's own settings are added under other names."""
    values = DialogueSettings(Config(), {"template": "mine", "units": "km"}).values
    assert (values["template"], values["units"]) == ("search_r1", "km")


def test_a_checkpoint_has_the_settings_and_the_template(tmp_path: Path) -> None:
    """As they were at the start of the run, and so does what is exported from it."""
    template = tmp_path / "mine.yaml"
    template.write_text("instruction: 'Q {question}'\ninvalid_action: again\n")
    config = grpo_config(tmp_path / "run")
    config.template, config.max_turns = str(template), 4
    trainer = build_trainer(config, [])
    template.write_text("changed")
    step = tmp_path / "global_step_1"
    joined_writer([trainer.source, hook_of(trainer, Export)], trainer.state_dict())(step)
    out = tmp_path / "out"
    out.mkdir()
    exporting._write_settings(step, out)
    read = run_config(InferenceOptions(model="m"), str(out))
    assert (read.template, read.max_turns) == (str(out / "template.yaml"), 4)
    assert "Q {question}" in Path(read.template).read_text()


def test_an_older_checkpoint_says_it_by_its_options(tmp_path: Path) -> None:
    """Their nested form is read; options that did not exist are left out."""
    options = asdict(changed_config())
    del options["algorithm"]["no_think_rl"]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"config": options}))
    exporting._write_settings(tmp_path, tmp_path)
    config = run_config(InferenceOptions(model="m"), str(tmp_path))
    expected = {**CHANGED, "algorithm.no_think_rl": False}
    assert {key: get_option(config, key) for key in SETTINGS} == expected
