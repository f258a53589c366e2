"""The command line of a training run: a preset and `key=value` overrides become a `Config`.

Hydra composes a preset, the presets it builds on, and preset groups (`+hardware=8x80`). Their
options, and then the overrides, are set one by one in a `Config`, each under its current name.
`--cfg job`, `--config-name`, `--config-dir` and `--multirun` work as in Hydra. `hydra.main` is not
used, because it reports a user's mistake with its own text and status 1, creates a folder
`outputs/` and replaces the logging.
"""

import argparse
import contextlib
import functools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, cast

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl.config import Config, overrides
from verl.config.known import (
    check,
    expand_home,
    flatten,
    known_options,
    options_help,
    settings,
)
from verl.errors import ConfigError, explain, redact

PRESETS = Path(__file__).parent / "presets"
DEFAULT_PRESET = "ppo_trainer"
USAGE = """python3 -m verl.trainer.main_ppo [--config-name PRESET] [--cfg job] [--multirun]
       [+hardware=MACHINE] [key=value ...]"""
COMMON = (
    "data.train_files", "data.val_files", "data.train_batch_size",
    "actor_rollout_ref.model.path", "actor_rollout_ref.actor.optim.lr",
    "actor_rollout_ref.actor.ppo_mini_batch_size", "actor_rollout_ref.rollout.n_agent",
    "algorithm.adv_estimator", "trainer.n_gpus_per_node", "trainer.total_training_steps",
    "trainer.save_freq", "trainer.resume_mode", "reward_model.name", "retriever.url",
)  # fmt: skip
"""Options that `--help` lists; `--help-all` lists every option."""


def compose(argv: Sequence[str]) -> Config:
    """Return the checked configuration of a command line; the first one of a sweep."""
    return compose_runs(argv)[0]


def compose_runs(argv: Sequence[str]) -> list[Config]:
    """Return the checked configurations of a command line (without program name); several with -m.

    `--cfg job` prints the resolved YAML, complete or not, and exits with status 0, as `--help`
    does. Raises ConfigError.
    """
    parser = _parser(is_whole="--help-all" in argv)
    args = parser.parse_intermixed_args(list(argv))
    if args.help_all:
        parser.print_help()
        raise SystemExit(0)
    runs = overrides.runs(args.overrides) if args.multirun else [(args.overrides, "")]
    configs = []
    with _interpolation_errors():
        for arguments, label in runs:
            config = _compose(args.config_name, args.config_dir, arguments)
            if label:
                _label_run(config, label)
            configs.append(config)
        if args.cfg:
            sys.stdout.write("---\n".join(map(_to_yaml, configs)))
            raise SystemExit(0)
        return [_check_composed(config) for config in configs]


@contextlib.contextmanager
def _interpolation_errors() -> Iterator[None]:
    """Raise ConfigError for a `${…}` that cannot be resolved; OmegaConf resolves them last."""
    try:
        yield
    except OmegaConfBaseException as error:
        got, fix = " ".join(str(error).split()), "correct the ${…} of that option"
        raise ConfigError(explain("options", got, "references to options", fix)) from error


def resolve_config(config: Config, arguments: Sequence[str] = ()) -> Config:
    """Return a checked and resolved copy of a configuration made in Python, as from a command line.

    `arguments` are `key=value` overrides that win over `config`. Raises ConfigError.
    """
    _check_attributes(config)
    schema = OmegaConf.structured(Config)
    for key, _, _, value in settings(config):
        if "[" not in key and value != MISSING:  # the items of a list are set with the list
            overrides.check_type(key, _plain(value), schema)
    parsed = map(overrides.parse, arguments)
    overrides.apply(((one.key_or_group, overrides.value_of(one)) for one in parsed), schema)
    with _interpolation_errors():
        return _check_composed(schema)


def _check_attributes(section: Any, prefix: str = "") -> None:
    """Raise ConfigError for an attribute that is not an option, such as a misspelt one."""
    names = {field.name for field in fields(section)}
    for name, value in vars(section).items():
        if name not in names:
            raise overrides.unknown_key(f"{prefix}{name}")
        if is_dataclass(value):
            _check_attributes(value, f"{prefix}{name}.")


def _plain(value: Any) -> Any:
    """Convert a path, or the paths in a list, to text."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _check_composed(config: DictConfig) -> Config:
    _set_offline_defaults(config)
    if missing := sorted(OmegaConf.missing_keys(config)):
        fix = "add " + " ".join(f"{key}=…" for key in missing)
        raise ConfigError(explain(", ".join(missing), "nothing", "a value each", fix))
    run = cast(Config, OmegaConf.to_object(config))
    expand_home(run)
    check(run)
    return run


def _set_offline_defaults(config: DictConfig) -> None:
    """Turn off questions and validation in a run that trains on recorded trajectories."""
    if config.data.rollouts is None:
        return
    config.data.train_files, config.data.val_files = [], []
    config.trainer.val_before_train = False
    if config.trainer.test_freq == -1:
        config.trainer.test_freq = 0


def _label_run(config: DictConfig, label: str) -> None:
    """Give a run of a sweep its own name and folders, by adding the label of its choices."""
    trainer = config.trainer
    for key in ("default_local_dir", "rollout_data_dir"):
        if trainer[key] is not None:
            trainer[key] = f"{trainer[key]}/{label}"
    trainer.experiment_name = f"{trainer.experiment_name}-{label}"


def write_resolved(config: Config, directory: str | Path) -> Path:
    """Write the configuration to `config.yaml` in `directory`, and return its path."""
    path = Path(directory) / "config.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(redact(_to_yaml(OmegaConf.structured(config))), encoding="utf-8")
    return path


def public_options(config: Config) -> dict[str, Any]:
    """Return the options as JSON values for checkpoints and trackers, without secrets in URLs."""
    return dict(json.loads(redact(json.dumps(asdict(config)))))


def _to_yaml(config: DictConfig) -> str:
    return OmegaConf.to_yaml(config, resolve=True)  # missing values stay `???`


def _parser(is_whole: bool) -> argparse.ArgumentParser:
    """Return the parser, whose help lists all options, or those of `COMMON`."""
    options = known_options()
    shown = options.values() if is_whole else [options[name] for name in COMMON]
    parser = argparse.ArgumentParser(
        prog="search-r1 train",
        usage=USAGE,
        description="Train an agent. Options are key=value; the last value of an option wins.",
        epilog=options_help(shown).replace("%", "%%"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="options of the run")
    parser.add_argument("--help-all", action="store_true", help="list all options and exit")
    parser.add_argument("--cfg", choices=["job"], help="print the resolved options and exit")
    names = f"preset to start from: {', '.join(_preset_names(PRESETS))}"
    parser.add_argument("--config-name", "-cn", default=DEFAULT_PRESET, help=names)
    parser.add_argument("--config-dir", "-cd", default=PRESETS, type=Path, help="folder of presets")
    sweep = "one run per combination of values (trainer.seed=0,1,2), one after another"
    parser.add_argument("--multirun", "-m", action="store_true", help=sweep)
    return parser


def _preset_names(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.yaml"))


def _compose(preset: str, folder: Path, arguments: Sequence[str]) -> DictConfig:
    """Return the options of the presets and, where they are given, of the arguments."""
    folders = (path for parent in (PRESETS, folder) for path in parent.glob("*"))
    groups = {path.name for path in folders if path.is_dir()}
    parsed = [overrides.parse(argument) for argument in arguments]
    choices = [str(one.input_line) for one in parsed if one.key_or_group in groups]
    given = [
        (o.key_or_group, overrides.value_of(o)) for o in parsed if o.key_or_group not in groups
    ]
    config: DictConfig = OmegaConf.structured(Config)
    overrides.apply(flatten(_presets(preset, folder, choices), is_whole=_is_whole), config)
    overrides.apply(given, config)
    return config


def _presets(preset: str, folder: Path, choices: Sequence[str]) -> Mapping[str, Any]:
    """Compose a preset of the user's `folder`, which may build on the shipped ones, with Hydra."""
    name = preset.removesuffix(".yaml")
    if not (folder / f"{name}.yaml").is_file():
        known = ", ".join(_preset_names(folder)) or "none"
        fix = "choose one of them, or name another folder with --config-dir"
        raise ConfigError(explain("--config-name", preset, f"a preset of {folder} ({known})", fix))
    if folder == PRESETS:
        return _shipped(name, tuple(choices))
    return _composed(name, folder, choices)


@functools.cache
def _shipped(name: str, choices: tuple[str, ...]) -> Mapping[str, Any]:
    """Compose a shipped preset; the runs of a sweep begin with the same one."""
    return _composed(name, PRESETS, choices)


def _composed(name: str, folder: Path, choices: Sequence[str]) -> Mapping[str, Any]:
    # Presets may name it as their base, though every option has its default without it.
    ConfigStore.instance().store(name="config_schema", node={})
    shipped = f"hydra.searchpath=['file://{PRESETS.resolve()}']"
    try:
        # Not `initialize`, which takes 0.2 s to look for its caller's file in a large program.
        with initialize_config_dir(str(folder.resolve()), version_base="1.3"):
            composed = hydra_compose(name, overrides=[*choices, shipped])
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        cause = " ".join(str(error).partition("Config search path")[0].split())
        fix = f"correct {folder / name}.yaml or the options given"
        problem = explain(f"preset {name}", cause, "options of verl/config/", fix)
        raise ConfigError(problem) from error
    return cast(Mapping[str, Any], OmegaConf.to_container(composed, resolve=False))


def _is_whole(key: str) -> bool:
    """Whether a mapping in a preset is the value of one option, none of whose entries is an alias.

    veRL has `engine_kwargs: {vllm: {…}, sglang: {…}}`.
    """
    name = overrides.current_name(key)
    has_alias = any(alias.startswith(f"{name}.") for alias in overrides.ALIASES)
    return name in known_options() and not has_alias
