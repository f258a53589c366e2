"""train_ppo.sh and train_grpo.sh: the paper's recipes, and how their values are overridden."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from verl.config import Config, cli

ROOT = Path(__file__).parents[1]
SHIM = """#!/bin/sh
[ "$1" = -c ] && echo {missing} && exit {status}
printf '%s\\n' "$@"
"""
ENGINE = "actor_rollout_ref.rollout.name"


def arguments(
    script: str, tmp_path: Path, *extra: str, missing: str = "", **environment: str
) -> list[str]:
    """Return the arguments that the script passes to python, with a python that prints them.

    `missing` names packages that this python lacks.
    """
    return run(script, tmp_path, *extra, missing=missing, **environment).stdout.splitlines()


def run(
    script: str, tmp_path: Path, *extra: str, missing: str = "", status: int = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the script with a python whose checks end with `status`. Raises RuntimeError."""
    shim = tmp_path / "python"
    shim.write_text(SHIM.format(missing=missing, status=status))
    shim.chmod(0o755)
    clean = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHON": str(shim), **environment}
    done = subprocess.run(
        ["bash", str(ROOT / script), *extra],
        env=clean,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
    )
    if done.returncode:
        raise RuntimeError(f"{done.returncode}: {done.stderr}")
    return done


def config_of(script: str, tmp_path: Path, *extra: str, **environment: str) -> Config:
    """Return the configuration of the script's run."""
    module, *options = arguments(script, tmp_path, *extra, **environment)[1:]
    assert module == environment.get("ENTRY", "verl.trainer.main_ppo")
    return cli.compose(options)


def test_grpo_is_the_papers_recipe(tmp_path: Path) -> None:
    """The published hyper-parameters of GRPO, v0.2."""
    config = config_of("train_grpo.sh", tmp_path)
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert config.algorithm.adv_estimator == "grpo"
    assert (rollout.n_agent, rollout.temperature, rollout.gpu_memory_utilization) == (5, 1.0, 0.6)
    assert (actor.use_kl_loss, actor.kl_loss_coef, actor.kl_loss_type) == (
        True,
        0.001,
        "low_var_kl",
    )
    assert not config.kl_in_reward
    assert_common(config)


@pytest.mark.parametrize(
    ("environment", "in_reward"),
    [({}, 0.0), ({"KL_COEF": "0.5"}, 0.5), ({"KL_COEF": "0"}, 0.0)],
)
def test_grpo_without_a_kl_loss_has_no_kl_unless_asked(
    environment: dict[str, str], in_reward: float, tmp_path: Path
) -> None:
    """KL_COEF is that of the KL in the reward where there is none in the loss."""
    config = config_of("train_grpo.sh", tmp_path, USE_KL_LOSS="false", **environment)
    assert config.kl_in_reward is (in_reward > 0)
    assert config.algorithm.kl_ctrl.kl_coef == in_reward
    assert config.needs_reference is (in_reward > 0)


def test_ppo_may_have_the_kl_in_the_loss(tmp_path: Path) -> None:
    """The variables are those of GRPO."""
    config = config_of("train_ppo.sh", tmp_path, USE_KL_LOSS="true", KL_COEF="0.25")
    assert not config.kl_in_reward
    assert config.actor_rollout_ref.actor.kl_loss_coef == 0.25


def test_ppo_is_the_papers_recipe(tmp_path: Path) -> None:
    """The published hyper-parameters of PPO, v0.2."""
    config = config_of("train_ppo.sh", tmp_path)
    assert config.algorithm.adv_estimator == "gae"
    assert (config.algorithm.gamma, config.algorithm.lam) == (1.0, 1.0)
    assert config.algorithm.kl_ctrl.kl_coef == 0.001
    assert config.kl_in_reward
    assert config.actor_rollout_ref.rollout.n_agent == 1
    assert config.critic.optim.lr == 1e-5
    assert config.critic.optim.lr_warmup_steps_ratio == 0.015
    assert config.critic.model.path == "Qwen/Qwen2.5-3B"
    assert_common(config)


def assert_common(config: Config) -> None:
    """Check the options that both recipes share."""
    data, actor, trainer = config.data, config.actor_rollout_ref.actor, config.trainer
    lengths = (data.max_prompt_length, data.max_response_length)
    assert (*lengths, data.max_start_length, data.max_obs_length) == (4096, 500, 2048, 500)
    assert (data.train_batch_size, data.val_batch_size) == (512, 256)
    assert data.train_files == "data/nq_search/train.parquet"
    assert data.val_files == "data/nq_search/test.parquet"
    assert actor.ppo_mini_batch_size == 256
    assert actor.ppo_max_token_len_per_gpu is None
    assert (actor.optim.lr, actor.optim.lr_warmup_steps_ratio) == (1e-6, 0.285)
    assert actor.state_masking
    assert config.actor_rollout_ref.model.path == "Qwen/Qwen2.5-3B"
    assert (trainer.n_gpus_per_node, trainer.nnodes, trainer.total_training_steps) == (8, 1, 1005)
    assert (trainer.save_freq, trainer.test_freq) == (100, 50)
    assert "wandb" in trainer.logger
    assert (config.max_turns, config.retriever.topk) == (2, 3)
    assert config.retriever.url == "http://127.0.0.1:8000/retrieve"


@pytest.mark.parametrize("script", ["train_ppo.sh", "train_grpo.sh"])
def test_environment_overrides_values(script: str, tmp_path: Path) -> None:
    """Values come from the environment where they are set, also with spaces in paths."""
    config = config_of(
        script,
        tmp_path,
        BASE_MODEL="/models/my model",
        DATA_DIR="/d",
        N_GPUS="2",
        ROLLOUT_GPUS="6",
        RETRIEVER_URL="http://h:1/retrieve",
        EXPERIMENT_NAME="e",
        PROJECT_NAME="p",
        TOTAL_STEPS="7",
        TRAIN_BATCH_SIZE="16",
        OUTPUT_DIR="/o",
        LOGGER="console",
    )
    trainer = config.trainer
    assert config.actor_rollout_ref.model.path == "/models/my model"
    assert config.data.val_files == "/d/test.parquet"
    assert config.retriever.url == "http://h:1/retrieve"
    assert (trainer.n_gpus_per_node, trainer.total_training_steps) == (2, 7)
    assert (trainer.rollout_gpus, config.placement.num_engines(on_gpu=True)) == (6, 6)
    assert (trainer.project_name, trainer.experiment_name, trainer.logger) == ("p", "e", "console")
    assert (config.data.train_batch_size, trainer.default_local_dir) == (16, "/o")


def test_variables_without_effect_are_passed_on_to_be_answered(tmp_path: Path) -> None:
    """The options that they set are warned about by name; unset, they add nothing."""
    sizes = {"MICRO_BATCH_SIZE": "4", "CRITIC_MICRO_BATCH_SIZE": "8"}
    found = set(arguments("train_ppo.sh", tmp_path, **sizes)) - set(
        arguments("train_ppo.sh", tmp_path)
    )
    names = ("actor_rollout_ref.actor", "critic")
    assert found == {f"{names[0]}.ppo_micro_batch_size=4", f"{names[1]}.ppo_micro_batch_size=8"}


@pytest.mark.parametrize("script", ["train_ppo.sh", "train_grpo.sh"])
def test_arguments_win_over_everything(script: str, tmp_path: Path) -> None:
    """A key=value argument beats the script's value and the environment's."""
    extra = ("+max_turns=4", "trainer.total_training_steps=3")
    config = config_of(script, tmp_path, *extra, TOTAL_STEPS="7")
    assert (config.max_turns, config.trainer.total_training_steps) == (4, 3)


OFFLOADS = [
    ({}, (None, None, None)),
    ({"OFFLOAD": "true"}, (True, True, True)),
    ({"OFFLOAD": "false"}, (False, False, False)),
    ({"REF_OFFLOAD": "true"}, (None, None, True)),
    ({"OFFLOAD": "false", "REF_OFFLOAD": "true"}, (False, False, True)),
]


@pytest.mark.parametrize("script", ["train_ppo.sh", "train_grpo.sh"])
@pytest.mark.parametrize(("environment", "expected"), OFFLOADS, ids=str)
def test_offload_is_open_unless_it_is_set(
    script: str,
    environment: dict[str, str],
    expected: tuple[bool | None, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`--cfg job` prints the offloading of each model: as set, or null where memory decides."""
    options = arguments(script, tmp_path, **environment)[2:]
    with pytest.raises(SystemExit):
        cli.compose([*options, "--cfg", "job"])
    printed = yaml.safe_load(capsys.readouterr().out)
    policy = printed["actor_rollout_ref"]
    actor, reference = policy["actor"]["fsdp_config"], policy["ref"]["fsdp_config"]
    learned = [actor, printed["critic"]["model"]["fsdp_config"]]
    for section in learned if script == "train_ppo.sh" else learned[:1]:
        assert (section["param_offload"], section["optimizer_offload"]) == expected[:2]
    assert reference["param_offload"] is expected[2]


def test_paths_of_a_run_stay_relative_to_the_caller(tmp_path: Path) -> None:
    """The script works from any folder: only PYTHONPATH points to the checkout."""
    assert arguments("train_ppo.sh", tmp_path)[0] == "-m"


def test_missing_packages_are_told_in_one_line(tmp_path: Path) -> None:
    """A python without the packages prints the fix instead of a traceback."""
    with pytest.raises(RuntimeError, match=r"^2: .*lacks the packages .*ray vllm.* 'make install'"):
        run("train_grpo.sh", tmp_path, missing="ray vllm")
    with pytest.raises(RuntimeError, match=r"^2: .*cannot be run: .* set PYTHON"):
        run("train_grpo.sh", tmp_path, status=1)


@pytest.mark.parametrize("script", ["train_ppo.sh", "train_grpo.sh"])
def test_without_vllm_the_transformers_engine_is_taken_and_said(
    script: str, tmp_path: Path
) -> None:
    """In one line on standard error; with vLLM nothing is said, and the default engine stays."""
    done = run(script, tmp_path, missing="vllm", DATA_DIR="mine")
    assert (
        cli.compose(done.stdout.splitlines()[2:]).actor_rollout_ref.rollout.name == "transformers"
    )
    assert done.stderr.count("\n") == 1 and f"{ENGINE}=transformers" in done.stderr
    done = run(script, tmp_path, DATA_DIR="mine")
    assert cli.compose(done.stdout.splitlines()[2:]).actor_rollout_ref.rollout.name == "vllm"
    assert done.stderr == ""


@pytest.mark.parametrize(
    "option",
    [f"{ENGINE}=vllm", f"++{ENGINE}=mine.py:Engine", "data.rollouts=runs/a/rollouts",
     "+actor_rollout_ref.rollout.url=http://a:8001"],
)  # fmt: skip
def test_without_vllm_the_users_engine_stays(option: str, tmp_path: Path) -> None:
    """Neither an engine of the user, nor servers elsewhere, nor a run without one is replaced."""
    done = run("train_grpo.sh", tmp_path, option, missing="vllm", DATA_DIR="mine")
    assert f"{ENGINE}=transformers" not in done.stdout.splitlines()
    assert done.stderr == ""


def test_entry_can_be_the_format_reward(tmp_path: Path) -> None:
    """ENTRY chooses main_ppo_format with the same recipe."""
    config_of("train_grpo.sh", tmp_path, ENTRY="verl.trainer.main_ppo_format")


@pytest.mark.parametrize("script", ["train_ppo.sh", "train_grpo.sh", "scripts/train_common.sh"])
def test_script_is_sound_bash(script: str) -> None:
    """Bash parses every line of it."""
    subprocess.run(["bash", "-n", str(ROOT / script)], check=True, timeout=30)


def test_environment_of_ray_jobs_leaves_large_folders_behind() -> None:
    """`ray job submit --runtime-env` sends the checkout without environments and outputs."""
    environment = yaml.safe_load((ROOT / "verl/trainer/runtime_env.yaml").read_text())
    assert environment["working_dir"] == "./"
    assert {"/.venv/", "/runs/", "/models/"} <= set(environment["excludes"])


def test_missing_questions_are_answered_with_the_command_that_builds_them(tmp_path: Path) -> None:
    """Only where the run would read them, and where the command is known."""
    told = run("train_grpo.sh", tmp_path).stderr
    assert "scripts/data_process/nq_search.py --local_dir data/nq_search" in told
    assert run("train_grpo.sh", tmp_path, DATA_DIR="data/mine").stderr == ""
    assert run("train_grpo.sh", tmp_path, "data.train_files=mine.parquet").stderr == ""
    (tmp_path / "data" / "nq_search").mkdir(parents=True)
    (tmp_path / "data" / "nq_search" / "train.parquet").touch()
    assert run("train_grpo.sh", tmp_path).stderr == ""
