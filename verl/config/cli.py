"""The command line of a training run: presets and `key=value` overrides become one `Config`.

Hydra composes `verl.config.Config` with a preset of `verl/config/presets/`, of groups of presets
(`+hardware=8x80`) and the overrides. `hydra.compose` and not `hydra.main`, which ends a user's
mistake with its own text and status 1, makes a folder `outputs/` and replaces the logging. The
options `--cfg job`, `--config-name`, `--config-dir` and `--multirun` are as Hydra has them.
"""

from __future__ import annotations

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
from hydra import initialize
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
from verl.config.known import check, expand_home, flatten, known_options, settings, to_argument
from verl.errors import ConfigError, explain, redact

PRESETS = Path(__file__).parent / "presets"
DEFAULT_PRESET = "ppo_trainer"
OF_HYDRA = ("defaults", "hydra")
USAGE = """python3 -m verl.trainer.main_ppo [--config-name PRESET] [--cfg job] [--multirun]
       [+hardware=MACHINE] [key=value ...]"""


def compose(argv: Sequence[str]) -> Config:
    """The checked configuration of a command line, the first of a sweep; see `compose_runs`."""
    return compose_runs(argv)[0]


def compose_runs(argv: Sequence[str]) -> list[Config]:
    """The checked configurations of a command line, without the program's name; more with -m.

    `--cfg job` prints the resolved YAML and exits with status 0, as `--help` does, whether or not
    the configuration is complete. Raises ConfigError.
    """
    args = _parser().parse_intermixed_args(list(argv))
    folders = (path for folder in (PRESETS, args.config_dir) for path in folder.glob("*"))
    groups = {path.name for path in folders if path.is_dir()}
    runs = overrides.runs(args.overrides) if args.multirun else [(args.overrides, "")]
    found = []
    with _resolving():
        for arguments, label in runs:
            chosen = overrides.normalise(arguments, groups)
            config = _compose(args.config_name, args.config_dir, chosen)
            if label:
                _set_apart(config, label)
            found.append(config)
        if args.cfg:
            sys.stdout.write("---\n".join(map(_to_yaml, found)))
            raise SystemExit(0)
        return [_check_composed(config) for config in found]


@contextlib.contextmanager
def _resolving() -> Iterator[None]:
    """Tell of a ${…} that stands for nothing: they are looked up last."""
    try:
        yield
    except OmegaConfBaseException as error:
        got, fix = " ".join(str(error).split()), "correct the ${…} of that option"
        raise ConfigError(explain("options", got, "references to options", fix)) from error


def resolve_config(config: Config, words: Sequence[str] = ()) -> Config:
    """A configuration made in Python as a command line's would be: typed, resolved, checked.

    The one that is given stays as it is; `words`, each `key=value`, win over it. Raises
    ConfigError.
    """
    _refuse_strangers(config)
    schema = OmegaConf.structured(Config)
    for key, _, _, value in settings(config):
        if "[" not in key and value != MISSING:  # those within a list come with the list
            overrides.check_type(key, _plain(value), schema)
    for word in map(overrides.parse, words):
        for key, value in overrides.translate(word.key_or_group, word.value()).items():
            overrides.check_type(key, value, schema)
    with _resolving():
        return _check_composed(schema)


def _refuse_strangers(section: Any, prefix: str = "") -> None:
    """Raise ConfigError for an attribute that is no option: it would be without effect."""
    names = {field.name for field in fields(section)}
    for name, value in vars(section).items():
        if name not in names:
            raise overrides.unknown_key(f"{prefix}{name}")
        if is_dataclass(value):
            _refuse_strangers(value, f"{prefix}{name}.")


def _plain(value: Any) -> Any:
    """Paths as text, also within lists."""
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return str(value) if isinstance(value, Path) else value


def _check_composed(config: DictConfig) -> Config:
    _settle_record(config)
    if missing := sorted(OmegaConf.missing_keys(config)):
        fix = "add " + " ".join(f"{key}=…" for key in missing)
        raise ConfigError(explain(", ".join(missing), "nothing", "a value each", fix))
    run = cast(Config, OmegaConf.to_object(config))
    expand_home(run)
    check(run)
    return run


def _settle_record(config: DictConfig) -> None:
    """A run that learns from recorded trajectories has neither questions nor validations."""
    if config.data.rollouts is None:
        return
    config.data.train_files, config.data.val_files = [], []
    config.trainer.val_before_train = False
    if config.trainer.test_freq == -1:
        config.trainer.test_freq = 0


def _set_apart(config: DictConfig, label: str) -> None:
    """Name a run of a sweep, and give it folders of its own, by the options that it differs in."""
    trainer = config.trainer
    for key in ("default_local_dir", "rollout_data_dir"):
        if trainer[key] is not None:
            trainer[key] = f"{trainer[key]}/{label}"
    trainer.experiment_name = f"{trainer.experiment_name}-{label}"


def write_resolved(config: Config, directory: str | Path) -> Path:
    """Write the configuration as `config.yaml` in `directory` and return that path."""
    path = Path(directory) / "config.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(redact(_to_yaml(OmegaConf.structured(config))), encoding="utf-8")
    return path


def public_options(config: Config) -> dict[str, Any]:
    """The options as JSON, for checkpoints and trackers: without the passwords of addresses."""
    return dict(json.loads(redact(json.dumps(asdict(config)))))


def _to_yaml(config: DictConfig) -> str:
    """YAML with interpolations resolved; what is missing stays `???`."""
    return OmegaConf.to_yaml(config, resolve=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="search-r1 train",
        usage=USAGE,
        description="Train an agent. Options are key=value; a later one wins.",
        epilog=_options_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="options of the run")
    parser.add_argument("--cfg", choices=["job"], help="print the resolved options, start nothing")
    names = f"preset to start from: {', '.join(_preset_names(PRESETS))}"
    parser.add_argument("--config-name", "-cn", default=DEFAULT_PRESET, help=names)
    parser.add_argument("--config-dir", "-cd", default=PRESETS, type=Path, help="folder of presets")
    sweep = "a run of each of several values (trainer.seed=0,1,2), one after another"
    parser.add_argument("--multirun", "-m", action="store_true", help=sweep)
    return parser


def _options_help() -> str:
    """Every option with its default and its sentence, two lines each."""
    lines = [
        f"  {option.key}={to_argument(option.default)}\n      ({option.type_name}) {option.doc}"
        for option in known_options().values()
    ]
    return "options:\n" + "\n".join(lines).replace("%", "%%")


def _preset_names(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.yaml"))


def _compose(preset: str, folder: Path, arguments: Sequence[str]) -> DictConfig:
    """Hydra's composition; a folder of the user's may build on the presets shipped here."""
    name = preset.removesuffix(".yaml")
    if not (folder / f"{name}.yaml").is_file():
        known = ", ".join(_preset_names(folder)) or "none"
        fix = "choose one of them, or name another folder with --config-dir"
        raise ConfigError(explain("--config-name", preset, f"a preset of {folder} ({known})", fix))
    _introduce()
    PresetPath.user_folder = folder
    try:
        with initialize(config_path=None, version_base="1.3"):
            return hydra_compose(name, overrides=list(arguments))
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        cause = " ".join(str(error).partition("Config search path")[0].split())
        fix = f"correct {folder / name}.yaml or the options given"
        got = explain(f"preset {name}", cause, "options of verl/config/", fix)
        raise ConfigError(got) from error


@functools.cache
def _introduce() -> None:
    """Tell Hydra of our options and presets, once: the making of their schema takes a while."""
    ConfigStore.instance().store(name="config_schema", node=Config)
    Plugins.instance().register(PresetSource)
    Plugins.instance().register(PresetPath)


class PresetSource(FileConfigSource):
    """Folders of YAML files under `preset://`, a scheme beside Hydra's own `file://`.

    Names must be translated file by file: once files are merged, nobody can tell which of two
    names for one option came last. Hydra has no public base class for that.
    """

    @staticmethod
    def scheme() -> str:
        """What a search path that is read in this way begins with."""
        return "preset"

    def load_config(self, config_path: str) -> ConfigResult:
        """One file; raises ConfigError where a key of it is no option."""
        result = super().load_config(config_path)
        is_whole = "/" not in config_path
        if is_whole or result.header["package"] == "_global_":
            result.config = _translated(result.config, is_whole)
        return result


class PresetPath(SearchPathPlugin):
    """Where Hydra looks for presets: the user's folder, then ours.

    `hydra.searchpath` would be too late: Hydra reads the first preset before it.
    """

    user_folder: ClassVar[Path] = PRESETS

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add both folders."""
        for folder in (self.user_folder, PRESETS):
            search_path.append("presets", f"{PresetSource.scheme()}://{folder.resolve()}")


def _translated(preset: Container, is_whole: bool) -> DictConfig:
    """The preset under the names here; a whole one without `defaults` starts from ours."""
    plain: Any = OmegaConf.to_container(preset, resolve=False)
    kept = {name: plain.pop(name) for name in OF_HYDRA if name in plain}
    if is_whole:
        kept.setdefault("defaults", ["config_schema", "_self_"])
    found = OmegaConf.create(kept)
    for given, value in flatten(
        plain, is_whole=lambda key: overrides.current_name(key) in known_options()
    ):
        for key, its_value in overrides.translate(given, value).items():
            OmegaConf.update(found, key, its_value, force_add=True)
    return found
