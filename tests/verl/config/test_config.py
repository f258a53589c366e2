"""Options of verl/config/: names of the original, defaults, descriptions, limits, and the page."""

import typing
from pathlib import Path

import pytest

from scripts import option_pages
from tests.verl.config.test_cli import REQUIRED
from verl.bounds import Bounds
from verl.config import Config, RewardConfig, cli, known, overrides
from verl.config.known import known_options, settings
from verl.config.option import Limits, Resume
from verl.config.policy import VLLM_LORA_RANKS
from verl.config.reward import PlateauConfig, StageConfig
from verl.errors import ConfigError
from verl.training.devices import DTYPES

STAGE = StageConfig(plateau=PlateauConfig())


ORIGINAL = {
    "data.train_files": ("x.parquet", "x.parquet"),
    "data.val_files": ("[x.parquet,y.parquet]", ["x.parquet", "y.parquet"]),
    "data.train_data_num": ("null", None),
    "data.val_data_num": ("100", 100),
    "data.train_batch_size": ("64", 64),
    "data.val_batch_size": ("32", 32),
    "data.max_prompt_length": ("8192", 8192),
    "data.max_response_length": ("400", 400),
    "data.max_start_length": ("1024", 1024),
    "data.max_obs_length": ("300", 300),
    "data.shuffle_train_dataloader": ("False", False),
    "algorithm.adv_estimator": ("gae", "gae"),
    "algorithm.no_think_rl": ("true", True),
    "algorithm.kl_ctrl.kl_coef": ("0.002", 0.002),
    "actor_rollout_ref.model.path": ("Qwen/Qwen2.5-3B", "Qwen/Qwen2.5-3B"),
    "actor_rollout_ref.model.enable_gradient_checkpointing": ("false", False),
    "actor_rollout_ref.actor.optim.lr": ("1e-6", 1e-6),
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": ("0.285", 0.285),
    "actor_rollout_ref.actor.use_kl_loss": ("true", True),
    "actor_rollout_ref.actor.kl_loss_coef": ("0.01", 0.01),
    "actor_rollout_ref.actor.kl_loss_type": ("low_var_kl", "low_var_kl"),
    "actor_rollout_ref.actor.ppo_mini_batch_size": ("128", 128),
    "actor_rollout_ref.actor.state_masking": ("false", False),
    "actor_rollout_ref.actor.fsdp_config.param_offload": ("true", True),
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": ("true", True),
    "actor_rollout_ref.rollout.name": ("vllm", "vllm"),
    "actor_rollout_ref.rollout.n_agent": ("5", 5),
    "actor_rollout_ref.rollout.temperature": ("1", 1.0),
    "actor_rollout_ref.rollout.top_p": ("0.95", 0.95),
    "actor_rollout_ref.rollout.gpu_memory_utilization": ("0.5", 0.5),
    "actor_rollout_ref.rollout.tensor_model_parallel_size": ("2", 2),
    "actor_rollout_ref.ref.fsdp_config.param_offload": ("True", True),
    "critic.optim.lr": ("1e-5", 1e-5),
    "critic.optim.lr_warmup_steps_ratio": ("0.015", 0.015),
    "critic.model.path": ("other", "other"),
    "critic.model.enable_gradient_checkpointing": ("true", True),
    "critic.model.fsdp_config.param_offload": ("true", True),
    "critic.model.fsdp_config.optimizer_offload": ("true", True),
    "trainer.logger": ("['wandb']", ["wandb"]),
    "trainer.val_only": ("true", True),
    "trainer.val_before_train": ("false", False),
    "trainer.n_gpus_per_node": ("4", 4),
    "trainer.nnodes": ("2", 2),
    "trainer.save_freq": ("100", 100),
    "trainer.test_freq": ("50", 50),
    "trainer.project_name": ("Search-R1", "Search-R1"),
    "trainer.experiment_name": ("nq-search-r1-ppo-qwen2.5-3b-em", "nq-search-r1-ppo-qwen2.5-3b-em"),
    "trainer.total_epochs": ("15", 15),
    "trainer.total_training_steps": ("1005", 1005),
    "trainer.default_local_dir": ("verl_checkpoints/exp", "verl_checkpoints/exp"),
    "trainer.critic_warmup": ("0", 0),
    "reward_model.name": ("em_format", "em_format"),
    "reward_model.structure_format_score": ("0.2", 0.2),
    "reward_model.final_format_score": ("0.1", 0.1),
    "reward_model.retrieval_score": ("0", 0.0),
    "max_turns": ("4", 4),
    "retriever.url": ("http://127.0.0.1:8000/retrieve", "http://127.0.0.1:8000/retrieve"),
    "retriever.topk": ("5", 5),
}
"""Each key of the original's scripts: a value as written there, and the value it must become."""


def read(config: object, key: str) -> object:
    """Return the option at a dotted key."""
    for name in overrides.current_name(key).split("."):
        config = config[name] if isinstance(config, dict) else getattr(config, name)
    return config


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_original_keys_parse_and_keep_their_meaning(plus: str) -> None:
    """One command line may set every option of the original, with or without plus signs."""
    config = cli.compose([f"{plus}{key}={text}" for key, (text, _) in ORIGINAL.items()])
    for key, (_, expected) in ORIGINAL.items():
        assert read(config, key) == expected, key


def test_defaults_of_the_dataclasses_pass_their_own_check() -> None:
    """The defaults form a valid configuration."""
    cli.compose(REQUIRED)


def test_every_option_is_described() -> None:
    """Each field has a description, which --help prints, a resume class, and a valid default."""
    for key, section, field, value in settings(Config(reward_model=RewardConfig(stages=[STAGE]))):
        assert known._field_doc(type(section), field.name), key
        limits = field.metadata["limits"]
        assert limits.resume in typing.get_args(Resume), key
        assert value is None or limits.allows(value), key


def test_limits_allow_and_describe_values() -> None:
    """Values at the bounds are allowed, values beyond them are not; the bounds are described."""
    for limits, inside, outside, description in (
        (Limits("free", Bounds(ge=1)), (1, 2), (0, float("nan"), 2**31), "1 or more"),
        (Limits("free", Bounds(gt=0, le=1)), (0.1, 1), (0, 1.1), "more than 0, at most 1"),
        (Limits("free", Bounds(ge=0, le=1)), (0, 1), (-0.1, 1.1), "from 0 to 1"),
        (Limits("free", choices=("a", "b")), ("a", ["a", "b"]), ("c", ["a", "c"]), "one of a, b"),
        (Limits("free", choices=(True, "a")), (True, "a"), (False, "b"), "one of true, a"),
        (Limits("free", choices=("a",), or_file=True), ("x.py:F",), ("x.py",), "one of a, or FI"),
        (Limits("free", choices="verl.core_algos.kl:KL_KINDS"), ("kl",), ("lk",), "one of kl, "),
    ):
        assert [limits.allows(value) for value in inside] == [True] * len(inside)
        assert [limits.allows(value) for value in outside] == [False] * len(outside)
        assert limits.expected().startswith(description)


def test_choices_agree_with_the_packages() -> None:
    """Dtypes and adapter ranks are repeated in the options, which must not import torch or vLLM."""
    options = known_options()
    words = options["actor_rollout_ref.rollout.dtype"].limits.allowed_words
    assert words == ("auto", *DTYPES)
    assert set(options["trainer.compute_dtype"].limits.allowed_words) < set(words)
    assert options["actor_rollout_ref.model.lora_rank"].limits.bounds.le == VLLM_LORA_RANKS[-1]


def test_the_page_of_options_is_up_to_date() -> None:
    """docs/reference/options.md is the output of `python -m scripts.option_pages options`."""
    path = Path(__file__).parents[3] / "docs" / "reference" / "options.md"
    stale = "print it again: python -m scripts.option_pages options > docs/reference/options.md"
    assert path.read_text() == option_pages.options(), stale


@pytest.mark.parametrize("section", ["actor_rollout_ref.model", "critic.model"])
@pytest.mark.parametrize(
    "wrong", [{"lora_rank": -1}, {"lora_rank": 513}, {"lora_rank": 8, "lora_alpha": 0}], ids=str
)
def test_adapters_that_cannot_work_are_refused(section: str, wrong: dict[str, int]) -> None:
    """A rank that vLLM does not support, and a scale of 0."""
    key = f"{section}.{list(wrong)[-1]}"
    with pytest.raises(ConfigError, match=key):
        cli.compose([*REQUIRED, *(f"{section}.{name}={value}" for name, value in wrong.items())])
