"""The command line: presets, overrides, refused settings, and its output."""

import logging
import os
import shlex
from operator import attrgetter
from pathlib import Path

import hydra
import pytest
import yaml

from verl.config import Config, cli, overrides
from verl.config.fallen import FALLEN_VALUES
from verl.errors import ConfigError
from verl.monitor.tracking import backend_names

REQUIRED = [
    "data.train_files=a.parquet",
    "data.val_files=b.parquet",
    "actor_rollout_ref.model.path=m",
]

ENGINES = "actor_rollout_ref.actor.old_log_probs=engine"
URL = "[http://a:1,http://b:2]"
RECOMPUTE = "actor_rollout_ref.actor.old_log_probs=recompute"
ADAPTIVE = "algorithm.kl_ctrl.type=adaptive"
ROLLOUT = "actor_rollout_ref.rollout"
KWARGS = f"{ROLLOUT}.engine_kwargs"


def compose(*arguments: str) -> Config:
    """Compose a configuration, with values for the options that have no default."""
    return cli.compose([*REQUIRED, *arguments])


def test_other_uses_of_hydra_are_left_alone(tmp_path: Path) -> None:
    """A program that composes a run may compose configurations of its own with Hydra."""
    compose()
    (tmp_path / "own.yaml").write_text("colour: blue\n")
    with hydra.initialize_config_dir(str(tmp_path), version_base="1.3"):
        assert hydra.compose("own").colour == "blue"


def test_last_of_two_values_wins() -> None:
    """A script and a later argument of the user may set the same key."""
    assert compose("max_turns=2", "+max_turns=5", "++max_turns=4").max_turns == 4


@pytest.mark.parametrize("argument", ["trainer.logger=wandb", "trainer.logger=['wandb']"])
def test_logger_is_a_name_or_a_list(argument: str) -> None:
    """Both spellings of the original's scripts are accepted."""
    assert backend_names(compose(argument).trainer.logger) == ["wandb"]


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("critic.optim.rl=1", "critic.optim.lr"),
        ("+trainer.n_gpu_per_node=1", "trainer.n_gpus_per_node"),
        ("n_agent=5", "actor_rollout_ref.rollout.n_agent"),
        ("max_turn=5", "max_turns"),
        ("actor_rollout_ref.actor.kl_coef=1", "algorithm.kl_ctrl.kl_coef"),
    ],
)
def test_unknown_key_names_the_nearest(wrong: str, near: str) -> None:
    """The error for a mistyped key suggests a known one."""
    with pytest.raises(ConfigError, match=f"did you mean {near}"):
        compose(wrong)


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ("critic.optim.lr=abc", "got 'abc', expected float"),
        ("max_turns=2.5", "got 2.5, expected int"),
        ("trainer.val_only=perhaps", "got 'perhaps', expected bool"),
        ("data.train_batch_size=null", "got None, expected int"),
        ("critic.optim=3", "expected options of this section"),
        ("data.train_files=a,b", "expected one value"),
        ("~max_turns", "expected key=value"),
        ("max_turns", "expected key=value"),
        ("trainer.project_name=a=[", "override grammar"),
    ],
)
def test_wrong_value_says_got_and_expected(wrong: str, expected: str) -> None:
    """An invalid value is refused with our message instead of Hydra's."""
    with pytest.raises(ConfigError) as caught:
        compose(wrong)
    assert expected in str(caught.value)
    assert "fix:" in str(caught.value)


def test_missing_options_are_listed() -> None:
    """All missing options without a default are listed in one error."""
    with pytest.raises(ConfigError, match=r"model\.path"):
        cli.compose([])


def test_n_of_one_leaves_n_agent_alone() -> None:
    """The original multiplies n by n_agent: n=1 must not undo n_agent=5."""
    names = ("actor_rollout_ref.rollout.n_agent=5", "actor_rollout_ref.rollout.n=1")
    assert compose(*names).actor_rollout_ref.rollout.n_agent == 5


def test_option_without_effect_warns_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An option without effect is logged once, with advice."""
    monkeypatch.setattr(overrides, "_warned", set())
    with caplog.at_level(logging.WARNING):
        compose("actor_rollout_ref.model.use_remove_padding=false")
        compose("actor_rollout_ref.model.use_remove_padding=false")
    (message,) = caplog.messages
    assert "use_remove_padding" in message and "never padded" in message


@pytest.mark.parametrize(
    ("arguments", "subject"),
    [
        ("algorithm.adv_estimator=ppo", "one of gae, grpo"),
        ("actor_rollout_ref.actor.policy_loss=pg", "one of ppo, gspo"),
        ("actor_rollout_ref.actor.kl_loss_type=kk", "kl_loss_type"),
        ("actor_rollout_ref.actor.rollout_is_threshold=0", "rollout_is_threshold: got 0"),
        ("algorithm.adv_estimator=grpo", "rollout.n_agent: got 1"),
        ("algorithm.filter_groups.enable=true", "rollout.n_agent: got 1"),
        (
            "actor_rollout_ref.actor.terms.llds=1 actor_rollout_ref.actor.ppo_mini_batch_size=512",
            "several updates a step",
        ),
        ("data.max_start_length=5000", "data.max_start_length"),
        ("data.max_obs_length=4096", "data.max_obs_length"),
        ("actor_rollout_ref.rollout.temperature=0", "rollout.temperature"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=4", "each of 8 ranks"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=513", "at most the 512 trajectories"),
        ("critic.ppo_mini_batch_size=1000000", "critic.ppo_mini_batch_size=512"),
        ("actor_rollout_ref.actor.optim.lr=inf", "optim.lr: got inf, expected more than 0"),
        ("critic.optim.lr=nan", "critic.optim.lr: got nan, expected more than 0, at most 1"),
        ("'reward_model.weights={em: nan}'", "reward_model.weights: got {'em': nan}"),
        ("trainer.seed=-1", "trainer.seed: got -1, expected from 0 to 4294967295"),
        ("data.train_batch_size=9223372036854775808", "expected 1 or more, a finite number of at"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size=3", "divisor"),
        (
            "trainer.rollout_gpus=3 actor_rollout_ref.rollout.tensor_model_parallel_size=2",
            "a divisor of trainer.rollout_gpus=3",
        ),
        (
            "trainer.rollout_gpus=1 actor_rollout_ref.rollout.name=remote",
            "trainer.rollout_gpus: got 1, expected 0: actor_rollout_ref.rollout.name=remote",
        ),
        *(
            (f"actor_rollout_ref.rollout.url={url} {more}", subject)
            for url, more, subject in (
                ("[a:1]", "", "expected addresses that begin with http://"),
                ("7", "", "rollout.url: got 7, expected a text"),
                ("[http://a:1,http://a:1/v1]", "", "expected each server only once"),
                (URL, "actor_rollout_ref.rollout.name=transformers", "rollout.name: got transf"),
                (URL, "trainer.nnodes=2", "weights_dir: got null, expected a folder"),
                (URL, "trainer.deterministic=true", "trainer.deterministic: got True, expected f"),
                (URL, "trainer.rollout_gpus=1", "rollout_gpus: got 1, expected 0: each server"),
                (URL, "actor_rollout_ref.rollout.num_replicas=2", "num_replicas: got 2, expected"),
                ("null", "actor_rollout_ref.rollout.weights_dir=w", "weights_dir: got w, expected"),
            )
        ),
        (
            "critic.n_gpus_per_node=4 algorithm.adv_estimator=rloo "
            "actor_rollout_ref.rollout.n_agent=5",
            "critic.n_gpus_per_node: got 4, expected null: rloo has no critic; fix",
        ),
        (
            "critic.n_gpus_per_node=4 critic.ppo_mini_batch_size=3",
            "critic.ppo_mini_batch_size: got 3, expected one trajectory or more for each of the",
        ),
        (
            "actor_rollout_ref.actor.ulysses_sequence_parallel_size=3",
            "ulysses_sequence_parallel_size: got 3, expected a divisor of 8 ranks",
        ),
        (
            "critic.n_gpus_per_node=2 actor_rollout_ref.actor.ulysses_sequence_parallel_size=4",
            "ulysses_sequence_parallel_size: got 4, expected a divisor of the critic's 2",
        ),
        (
            "actor_rollout_ref.actor.ulysses_sequence_parallel_size=4 "
            "actor_rollout_ref.actor.ppo_mini_batch_size=1",
            "got 1, expected one trajectory or more for each of 2 sequence-parallel groups of 4 "
            "ranks; fix: "
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        ),
        ("trainer.logger=[console,foo]", "trainer.logger: got [console,foo]"),
        ("trainer.default_local_dir=", "trainer.default_local_dir: got ''"),
        ("trainer.keep_last=0", "1 or more, or null; fix: trainer.keep_last=null, the default"),
        ("trainer.best_metric=score", "a metric of validation"),
        ("actor_rollout_ref.actor.rollout_mask_threshold=4", "rollout_mask=token (or sequence, g"),
        (
            "actor_rollout_ref.actor.rollout_mask=geometric",
            "also set actor_rollout_ref.actor.rollout_mask_threshold=2",
        ),
        (
            "actor_rollout_ref.actor.rollout_mask_floor=0.5",
            "also set actor_rollout_ref.actor.rollout_mask_threshold=2",
        ),
        (f"{ENGINES} actor_rollout_ref.actor.state_masking=false", "that no engine sampled"),
        (
            f"{RECOMPUTE} actor_rollout_ref.rollout.max_staleness=2",
            "up to 2 weight versions old",
        ),
        (f"{ENGINES} actor_rollout_ref.actor.rollout_is=token", "need no correction"),
        (f"{ROLLOUT}.top_p=0.9 actor_rollout_ref.actor.rollout_is=sequence", "top_p: got 0.9"),
        (
            f"{ROLLOUT}.top_p=0.9 actor_rollout_ref.actor.rollout_mask=geometric "
            "actor_rollout_ref.actor.rollout_mask_threshold=2",
            "top_p: got 0.9",
        ),
        (
            f"{KWARGS}.speculative_config.method=ngram trainer.deterministic=true",
            f"{KWARGS}.specul",
        ),
        (f"{KWARGS}.enable_prefix_caching=true trainer.deterministic=true", f"{KWARGS}.enable"),
        (f"{KWARGS}.enforce_eager=true {ROLLOUT}.name=transformers", "engines that the run starts"),
        (f"{KWARGS}.enforce_eager=true {ROLLOUT}.url=http://a:1", "give it to vllm serve"),
        (f"{KWARGS}.quantization=fp8_per_tensor", "a correction as well"),
        (f"{KWARGS}.kv_cache_dtype=fp8", "a correction as well"),
        (f"{ADAPTIVE} algorithm.kl_ctrl.target_kl=0", "kl_ctrl.target_kl: got 0"),
        (f"{ADAPTIVE} algorithm.kl_ctrl.kl_coef=0", "the KL in the reward, and there is none"),
        (f"{ADAPTIVE} actor_rollout_ref.actor.use_kl_loss=true", "and there is none"),
        ("algorithm.adv_estimator=reinforce trainer.critic_warmup=5", "reinforce has no critic"),
        ("retriever.url=localhost:8000", "retriever.url"),
        ("""'retriever.url="http://a:8000,b:8000"'""", "separated by commas"),
    ],
)
def test_settings_that_cannot_work_are_refused(arguments: str, subject: str) -> None:
    """The error names the option and the fix."""
    with pytest.raises(ConfigError) as caught:
        compose(*shlex.split(arguments))
    assert subject in str(caught.value)
    assert "fix:" in str(caught.value)


def test_check_lists_every_problem() -> None:
    """Two mistakes give two lines."""
    with pytest.raises(ConfigError) as caught:
        compose("max_turns=-1", "retriever.topk=0")
    assert len(str(caught.value).splitlines()) == 2


def test_greedy_validation_only_is_allowed() -> None:
    """Rules about training do not apply to a validation run."""
    grpo = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.temperature=0")
    assert compose("trainer.val_only=true", *grpo).trainer.val_only


def test_cfg_job_prints_resolved_yaml_and_exits(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--cfg job` prints the options, starts nothing and creates no folder."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        cli.compose(["max_turns=7", "--cfg", "job", "trainer.experiment_name=e"])
    printed = yaml.safe_load(capsys.readouterr().out)
    assert caught.value.code == 0
    assert printed["max_turns"] == 7
    assert printed["trainer"]["default_local_dir"] == "runs/Search-R1/e"
    assert os.listdir(tmp_path) == []
    assert Path.cwd() == tmp_path


def test_help_explains_options(capsys: pytest.CaptureFixture[str]) -> None:
    """`--help-all` lists all options with defaults, `--help` the common ones."""
    shown = {}
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as ended:
            cli.compose([flag])
        assert ended.value.code == 0
        shown[flag] = capsys.readouterr().out
    assert "Documents returned per query." in shown["--help-all"]
    assert shown["--help"].count("=") < 30 < 130 < shown["--help-all"].count("\n  ")
    assert "  retriever.url=" in shown["--help"] and "  retriever.topk=3" in shown["--help-all"]


def test_grpo_preset() -> None:
    """The shipped preset is a valid GRPO run."""
    config = compose("--config-name", "grpo_trainer")
    assert config.algorithm.adv_estimator == "grpo"
    assert config.actor_rollout_ref.rollout.n_agent == 5


def test_unknown_preset_lists_the_known_ones() -> None:
    """The error for a mistyped preset lists the presets of the folder."""
    with pytest.raises(ConfigError, match="grpo_trainer, ppo_trainer"):
        compose("--config-name", "nope")


def test_preset_of_the_user_builds_on_a_shipped_one(tmp_path: Path) -> None:
    """A user's preset may inherit from a shipped one; an unknown key in it is refused."""
    text = "defaults: [grpo_trainer, _self_]\nmax_turns: 9\n"
    (tmp_path / "mine.yaml").write_text(text)
    config = compose("--config-dir", str(tmp_path), "--config-name", "mine")
    assert (config.max_turns, config.algorithm.adv_estimator) == (9, "grpo")
    (tmp_path / "mine.yaml").write_text(text + "max_turnss: 9\n")
    with pytest.raises(ConfigError, match="max_turnss"):
        compose("--config-dir", str(tmp_path), "--config-name", "mine")


def test_resolved_config_composes_again(tmp_path: Path) -> None:
    """The config.yaml of a run is a preset that gives the same configuration."""
    config = compose("max_turns=3", "trainer.experiment_name=e")
    path = cli.write_resolved(config, tmp_path / "run")
    text = "defaults: [config_schema, _self_]\n" + path.read_text()
    (tmp_path / "again.yaml").write_text(text)
    assert cli.compose(["-cd", str(tmp_path), "-cn", "again"]) == config


def test_a_mapping_is_given_as_one_option() -> None:
    """Weights by name become a dictionary; a weight that is not a number is refused."""
    config = compose("reward_model.weights={em: 1.0, f1: 0.5}")
    assert config.reward_model.weights == {"em": 1.0, "f1": 0.5}
    with pytest.raises(ConfigError, match=r"reward_model\.weights"):
        compose("reward_model.weights={em: much}")


@pytest.mark.parametrize(
    ("arguments", "option", "expected"),
    [
        (["reward_model.weights={em: 1.0}", "reward_model.weights={f1: 1.0}"],
         "reward_model.weights", {"f1": 1.0}),
        (["data.filter={a: 1}", "data.filter={}"], "data.filter", {}),
        (["data.filter={a: 1}", "data.filter={b: {gt: 0}}"], "data.filter", {"b": {"gt": 0}}),
        (["data.filter={a: 1}", "data.filter.b=2"], "data.filter", {"a": 1, "b": 2}),
        (["--config-name", "stable", "actor_rollout_ref.actor.terms={}"],
         "actor_rollout_ref.actor.terms", {}),
    ],
)  # fmt: skip
def test_the_last_mapping_wins_whole(arguments: list[str], option: str, expected: object) -> None:
    """As the last value of any option does; a single entry is added."""
    assert attrgetter(option)(compose(*arguments)) == expected


@pytest.mark.parametrize("text", ["5867e688", "1e3", "1_000", "007", "0x1f", "12"])
def test_a_text_that_looks_like_a_number_stays_as_it_was_written(text: str) -> None:
    """Such as the start of a commit's hash; a number's option still gets a number."""
    config = compose(f"trainer.experiment_name={text}", "actor_rollout_ref.actor.optim.lr=1e-3")
    assert config.trainer.experiment_name == text
    assert config.actor_rollout_ref.actor.optim.lr == 1e-3


def test_a_reward_of_a_file_is_part_of_a_sum() -> None:
    """Its name has slashes, and a colon that Hydra requires to be escaped."""
    config = compose(r"reward_model.weights={em: 1.0, own/brief.py\:brief: -0.5}")
    assert config.reward_model.weights == {"em": 1.0, "own/brief.py:brief": -0.5}


def test_home_folder_is_expanded_in_presets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`~` is expanded in paths, as in veRL's YAML files, but not in other texts.

    References to code stay unchanged too: exported models and the state of stages contain them.
    """
    monkeypatch.setenv("HOME", "/home/ann")
    preset = "data: {train_files: [~/t.parquet, b.parquet], val_files: ~/v.parquet}\n"
    preset += "actor_rollout_ref: {model: {path: ~/models/m}}\n"
    preset += "agent: {tools: ['~/my.py:Tool']}\nreward_model: {name: '~/r.py:f'}\n"
    preset += "trainer: {experiment_name: a~b, "
    preset += "default_local_dir: '~/runs/${trainer.experiment_name}'}\n"
    (tmp_path / "own.yaml").write_text(preset)
    config = cli.compose(["-cd", str(tmp_path), "-cn", "own"])
    assert config.data.train_files == ["/home/ann/t.parquet", "b.parquet"]
    assert config.data.val_files == "/home/ann/v.parquet"
    assert config.actor_rollout_ref.model.path == "/home/ann/models/m"
    assert config.trainer.default_local_dir == "/home/ann/runs/a~b"
    assert (config.agent.tools, config.reward_model.name) == (["~/my.py:Tool"], "~/r.py:f")


@pytest.mark.parametrize(("key", "value"), FALLEN_VALUES)
def test_a_value_that_fell_is_answered_by_name(key: str, value: str) -> None:
    """The error says since when it is gone and what to use, instead of the default."""
    with pytest.raises(ConfigError) as caught:
        compose(f"{key}={value}")
    assert FALLEN_VALUES[key, value] in str(caught.value)
    assert "gone since" in FALLEN_VALUES[key, value]
