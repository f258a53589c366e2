"""The command line of a training run: a preset and `key=value` overrides become a `Config`.

Hydra composes `verl.config.Config` from a preset of `verl/config/presets/`, preset groups
(`+hardware=8x80`) and the overrides. `--cfg job`, `--config-name`, `--config-dir` and `--multirun`
work as in Hydra. `hydra.main` is not used, because it reports a user's mistake with its own text
and status 1, creates a folder `outputs/` and replaces the logging.
"""

import argparse
import contextlib
import functools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import MISSING, Container, DictConfig, OmegaConf
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
HYDRA_KEYS = ("defaults", "hydra")
"""Keys of a preset that belong to Hydra."""
USAGE = """python3 -m verl.trainer.main_ppo [--config-name PRESET] [--cfg job] [--multirun]
       [+hardware=MACHINE] [key=value ...]"""


def compose(argv: Sequence[str]) -> Config:
    """Return the checked configuration of a command line; the first one of a sweep."""
    return compose_runs(argv)[0]


def compose_runs(argv: Sequence[str]) -> list[Config]:
    """Return the checked configurations of a command line (without program name); several with -m.

    `--cfg job` prints the resolved YAML, complete or not, and exits with status 0, as `--help`
    does. Raises ConfigError.
    """
    args = _parser().parse_intermixed_args(list(argv))
    folders = (path for folder in (PRESETS, args.config_dir) for path in folder.glob("*"))
    groups = {path.name for path in folders if path.is_dir()}
    runs = overrides.runs(args.overrides) if args.multirun else [(args.overrides, "")]
    configs = []
    with _interpolation_errors():
        for arguments, label in runs:
            chosen = overrides.normalise(arguments, groups)
            config = _compose(args.config_name, args.config_dir, chosen)
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
    given = ((o.key_or_group, o.value()) for o in map(overrides.parse, arguments))
    for key, value in overrides.translate_all(given):
        overrides.check_type(key, value, schema)
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="search-r1 train",
        usage=USAGE,
        description="Train an agent. Options are key=value; the last value of an option wins.",
        epilog=options_help(known_options().values()).replace("%", "%%"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="options of the run")
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
    """Compose with Hydra. Presets in the user's `folder` may build on the shipped ones."""
    name = preset.removesuffix(".yaml")
    if not (folder / f"{name}.yaml").is_file():
        known = ", ".join(_preset_names(folder)) or "none"
        fix = "choose one of them, or name another folder with --config-dir"
        raise ConfigError(explain("--config-name", preset, f"a preset of {folder} ({known})", fix))
    _register_with_hydra()
    PresetPath.is_active = True
    try:
        # Not `initialize`, which takes 0.2 s to look for its caller's file in a large program.
        with initialize_config_dir(str(folder.resolve()), version_base="1.3"):
            return hydra_compose(name, overrides=list(arguments))
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        cause = " ".join(str(error).partition("Config search path")[0].split())
        fix = f"correct {folder / name}.yaml or the options given"
        problem = explain(f"preset {name}", cause, "options of verl/config/", fix)
        raise ConfigError(problem) from error
    finally:
        PresetPath.is_active = False


@functools.cache
def _register_with_hydra() -> None:
    """Register options and presets with Hydra; once, because building the schema is slow."""
    ConfigStore.instance().store(name="config_schema", node=Config)
    Plugins.instance().register(PresetSource)
    Plugins.instance().register(PresetPath)


class PresetSource(FileConfigSource):
    """Hydra config source for preset folders under `preset://`, in addition to `file://`.

    It translates aliases in each file before Hydra merges the files: afterwards the order of two
    names for one option would be lost. Hydra has no public base class for this.
    """

    @staticmethod
    def scheme() -> str:
        """Return the URL scheme of search paths that use this source."""
        return "preset"

    def load_config(self, config_path: str) -> ConfigResult:
        """Load one file with its names translated. Raises ConfigError for an unknown key."""
        result = super().load_config(config_path)
        is_primary = "/" not in config_path
        if is_primary or result.header["package"] == "_global_":
            result.config = _translate_preset(result.config, is_primary)
        return result


class PresetPath(SearchPathPlugin):
    """Hydra plugin that looks for presets in the user's folder, then among the shipped ones.

    The option `hydra.searchpath` would be too late: Hydra loads the first preset before reading it.
    Hydra calls a registered plugin for each composition in the process, also for a program's own.
    """

    is_active: ClassVar[bool] = False
    """Whether the composition is ours."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Read the main folder as presets, and append the shipped ones."""
        if not self.is_active:
            return
        scheme = PresetSource.scheme()
        for element in search_path.get_path():
            if element.provider == "main":
                element.path = f"{scheme}://{element.path}"
        search_path.append("presets", f"{scheme}://{PRESETS.resolve()}")


def _is_whole(key: str) -> bool:
    """Whether a mapping in a preset is the value of one option, none of whose entries is an alias.

    veRL has `engine_kwargs: {vllm: {…}, sglang: {…}}`.
    """
    name = overrides.current_name(key)
    has_alias = any(alias.startswith(f"{name}.") for alias in overrides.ALIASES)
    return name in known_options() and not has_alias


def _translate_preset(preset: Container, is_primary: bool) -> DictConfig:
    """Return the preset with current option names.

    A primary preset (not one of a group) without `defaults` builds on the defaults of all options.
    """
    options: Any = OmegaConf.to_container(preset, resolve=False)
    hydra_options = {name: options.pop(name) for name in HYDRA_KEYS if name in options}
    if is_primary:
        hydra_options.setdefault("defaults", ["config_schema", "_self_"])
    translated = OmegaConf.create(hydra_options)
    given = flatten(options, is_whole=_is_whole)
    for key, value in overrides.translate_all(given):
        OmegaConf.update(translated, key, value, force_add=True)
    return translated
