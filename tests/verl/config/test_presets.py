"""Presets with names of veRL, preset groups for hardware, and sweeps."""

from pathlib import Path

import pytest
import yaml

from tests.test_train_scripts import config_of
from tests.verl.config.test_cli import REQUIRED
from verl.config import cli, overrides
from verl.config.cli import PRESETS
from verl.errors import ConfigError, Interrupted, ModelError
from verl.trainer import main_ppo, run

VERL = """
data:
  tokenizer: null
  train_files: t.parquet
  val_files: v.parquet
  shuffle: false
  truncation: error
actor_rollout_ref:
  hybrid_engine: True
  model: {path: m, external_lib: null, override_config: {}}
  actor:
    strategy: fsdp
    use_dynamic_bsz: true
    ppo_mini_batch_size: 64
    fsdp_config: {wrap_policy: {min_num_params: 0}, param_offload: true, fsdp_size: -1}
    optim: {warmup_steps_ratio: 0.1}
  rollout: {n: 5, top_k: -1, multi_turn: {enable: false}}
reward_model: {enable: false, weights: {em: 1.0, f1: 0.5}}
ray_init: {num_cpus: null}
compat: search_r1
"""


def preset(folder: Path, text: str, *arguments: str) -> list[str]:
    """Write a preset, and return a command line that starts from it."""
    (folder / "mine.yaml").write_text(text)
    return ["--config-dir", str(folder), "--config-name", "mine", *arguments]


def test_a_preset_with_names_of_verl_composes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names are translated, and options without effect warn once unless their value is silent."""
    monkeypatch.setattr(overrides, "_warned", set())
    config = cli.compose(preset(tmp_path, VERL))
    policy = config.actor_rollout_ref
    assert not config.data.shuffle_train_dataloader
    assert policy.rollout.n_agent == 5
    assert policy.actor.optim.lr_warmup_steps_ratio == 0.1
    assert policy.actor.fsdp_config.param_offload is True
    assert config.reward_model.weights == {"em": 1.0, "f1": 0.5}
    assert config.is_as_original
    names = "ppo_mini_batch_size", "use_dynamic_bsz"
    assert [text.split()[0].split("=")[0] for text in caplog.messages] == [
        f"actor_rollout_ref.actor.{name}" for name in names
    ]


def test_an_unquoted_off_in_a_preset_is_the_choice_off(tmp_path: Path) -> None:
    """YAML reads it as false, for every option that has the choice."""
    text = "trainer: {memory_preflight: off, guard: {action: off}, trace: off}\n"
    trainer = cli.compose(preset(tmp_path, text, *REQUIRED)).trainer
    assert (trainer.memory_preflight, trainer.guard.action, trainer.trace) == ("off", "off", False)


def test_the_last_value_wins_under_either_name(tmp_path: Path) -> None:
    """An alias in a preset overrides the preset it builds on; an argument overrides both."""
    text = "defaults: [grpo_trainer, _self_]\nactor_rollout_ref: {rollout: {n: 8}}\n"
    line = preset(tmp_path, text, *REQUIRED)
    assert cli.compose(line).actor_rollout_ref.rollout.n_agent == 8
    argument = "actor_rollout_ref.rollout.n_agent=2"
    assert cli.compose([*line, argument]).actor_rollout_ref.rollout.n_agent == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_turnss: 9", "unknown option: got max_turnss.*did you mean max_turns"),
        ("actor_rollout_ref: {rollout: {top_k: 20}}", "top_k: got 20, expected -1 or 0.*top_p"),
        ("max_turns: many", "max_turns"),
    ],
)
def test_a_wrong_key_of_a_preset_is_refused_like_an_argument(
    tmp_path: Path, text: str, message: str
) -> None:
    """With a known name, or with advice."""
    with pytest.raises(ConfigError, match=message):
        cli.compose(preset(tmp_path, text, *REQUIRED))


TEACHER = "actor_rollout_ref.actor.teacher={url: 'http://h:1', served_model: x}"
PUBLISHED = {
    "search_r1_pp": ("reinforce", {}, True, ("f1", {"no_search": 0.1, "no_answer": 0.1})),
    "dgpo": ("gae", {"teacher": 0.1}, False, ("em", {})),
    "search_e1": ("grpo", {"sibling": 0.1}, False, ("em", {})),
    "stable": ("grpo", {"llds": 0.1}, False, ("em", {})),
}
"""Estimator, terms, closed thinking and reward of the published recipes."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_recipes_are_presets(name: str) -> None:
    """Each names its source, and an argument overrides it; only `dgpo` needs a teacher."""
    assert "arXiv 2" in (PRESETS / f"{name}.yaml").read_text().split("\n\n")[0]
    line = ["--config-name", name, *REQUIRED]
    needed = [TEACHER] if name == "dgpo" else []
    if needed:
        with pytest.raises(ConfigError, match=r"actor\.teacher"):
            cli.compose(line)
    config = cli.compose([*line, *needed])
    algorithm, reward = config.algorithm, config.reward_model
    assert PUBLISHED[name] == (
        algorithm.adv_estimator, config.actor_rollout_ref.actor.terms, algorithm.no_think_rl,
        (reward.name, reward.scores),
    )  # fmt: skip
    assert (config.trainer.guard.action == "stop") == (name == "stable")
    changed = cli.compose([*line, *needed, "algorithm.gamma=0.5", "reward_model.name=f1"])
    assert (changed.algorithm.gamma, changed.reward_model.name) == (0.5, "f1")


HARDWARE = sorted(path.stem for path in (PRESETS / "hardware").glob("*.yaml"))


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
@pytest.mark.parametrize("name", HARDWARE)
def test_hardware_presets_agree_with_the_recipes(name: str, algorithm: str, tmp_path: Path) -> None:
    """`+hardware=X` sets the same options as `PRESET=X` of the recipes."""
    line = ["--config-name", f"{algorithm}_trainer", *REQUIRED[:2], f"+hardware={name}"]
    group = cli.compose(line)
    recipe = config_of(f"train_{algorithm}.sh", tmp_path, PRESET=name)
    compared = [group.trainer.n_gpus_per_node, group.actor_rollout_ref.model]
    compared += [group.actor_rollout_ref.actor.ppo_max_token_len_per_gpu]
    compared += [group.actor_rollout_ref.actor.optim.lr]
    compared += [group.actor_rollout_ref.rollout.gpu_memory_utilization]
    expected = [recipe.trainer.n_gpus_per_node, recipe.actor_rollout_ref.model]
    expected += [recipe.actor_rollout_ref.actor.ppo_max_token_len_per_gpu]
    expected += [recipe.actor_rollout_ref.actor.optim.lr]
    expected += [recipe.actor_rollout_ref.rollout.gpu_memory_utilization]
    if algorithm == "ppo":
        for config, values in ((group, compared), (recipe, expected)):
            critic = config.critic
            adapter = (critic.model.lora_rank, critic.model.lora_alpha)
            values += [config.critic_path, critic.ppo_max_token_len_per_gpu, critic.optim.lr]
            values += [adapter if critic.model.has_adapter else 0]
    assert compared == expected
    changed = cli.compose([*line, "actor_rollout_ref.rollout.gpu_memory_utilization=0.3"])
    assert changed.actor_rollout_ref.rollout.gpu_memory_utilization == 0.3


def test_recipes_and_group_have_the_same_hardware_presets() -> None:
    """An unknown one is refused with the known ones."""
    scripts = PRESETS.parents[2] / "scripts" / "presets"
    assert sorted(path.stem for path in scripts.glob("*.sh")) == HARDWARE
    with pytest.raises(ConfigError, match="1x80"):
        cli.compose([*REQUIRED, "+hardware=9x80"])


def test_a_sweep_makes_one_run_per_combination(capsys: pytest.CaptureFixture[str]) -> None:
    """Every combination occurs once, with its own name and folder."""
    line = [*REQUIRED, "-m", "trainer.seed=0,1", "+max_turns=range(1,4)", "trainer.nnodes=1"]
    runs = cli.compose_runs(line)
    assert [(config.trainer.seed, config.max_turns) for config in runs] == [
        (seed, turns) for seed in (0, 1) for turns in (1, 2, 3)
    ]
    folders = [config.trainer.default_local_dir for config in runs]
    assert folders[1] == "runs/Search-R1/default/trainer.seed=0,max_turns=2"
    assert len({*folders}) == len({config.trainer.experiment_name for config in runs}) == 6
    with pytest.raises(SystemExit):
        cli.compose([*line, "--cfg", "job"])
    printed = list(yaml.safe_load_all(capsys.readouterr().out))
    assert [options["trainer"]["default_local_dir"] for options in printed] == folders


def test_several_values_need_multirun() -> None:
    """A typing mistake cannot start several runs; one bad value refuses the whole sweep."""
    with pytest.raises(ConfigError, match="--multirun"):
        cli.compose_runs([*REQUIRED, "trainer.seed=0,1"])
    with pytest.raises(ConfigError, match="max_turns: got -1"):
        cli.compose_runs([*REQUIRED, "-m", "max_turns=1,-1"])


def test_a_sweep_continues_after_a_failed_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its status is that of the first failure; an interrupt ends the whole sweep."""
    seeds: list[int] = []

    def train(config: object) -> None:
        seeds.append(config.trainer.seed)  # type: ignore[attr-defined]
        if seeds[-1] == 0:
            raise ModelError("no weights")
        if seeds[-1] == 2:
            raise Interrupted("asked to stop")

    monkeypatch.setattr(run, "run", train)
    assert main_ppo.main([*REQUIRED, "-m", "trainer.seed=0,1,2,3"]) == 2
    assert seeds == [0, 1, 2]
