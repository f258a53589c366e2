"""The command line of a training run: presets and `key=value` overrides become one `Config`.

Hydra composes `verl.config.Config` with a preset of `verl/config/presets/` and the overrides; it
makes no output folder and stays in the current one. `--cfg job` and `--help` print and exit.
Rules between options are in `verl.config.checks`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl.config import Config, overrides
from verl.config.known import known_options
from verl.errors import ConfigError, explain

PRESETS = Path(__file__).parent / "presets"
DEFAULT_PRESET = "ppo_trainer"
USAGE = "python3 -m verl.trainer.main_ppo [--config-name PRESET] [--cfg job] [key=value ...]"


def compose(argv: Sequence[str]) -> Config:
    """The checked configuration of a command line, without the program's name.

    `--cfg job` prints the resolved YAML and exits with status 0, as `--help` does, whether or not
    the configuration is complete. Raises ConfigError.
    """
    args = _parser().parse_intermixed_args(list(argv))
    config = _compose(args.config_name, args.config_dir, overrides.normalise(args.overrides))
    if args.cfg:
        sys.stdout.write(_to_yaml(config))
        raise SystemExit(0)
    _refuse_missing(config)
    overrides.warn_no_effect(config)
    typed = cast(Config, OmegaConf.to_object(config))
    from verl.config.checks import check  # noqa: PLC0415 - the registries it reads import torch

    check(typed)
    return typed


def write_resolved(config: Config, directory: str | Path) -> Path:
    """Write the configuration as `config.yaml` in `directory` and return that path."""
    path = Path(directory) / "config.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_to_yaml(OmegaConf.structured(config)), encoding="utf-8")
    return path


def _to_yaml(config: DictConfig) -> str:
    """YAML with interpolations resolved; what is missing stays `???`."""
    return OmegaConf.to_yaml(config, resolve=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        usage=USAGE,
        description="Train a search agent. Options are key=value; a later one wins.",
        epilog=_options_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="options of the run")
    parser.add_argument("--cfg", choices=["job"], help="print the resolved options, start nothing")
    parser.add_argument(
        "--config-name",
        "-cn",
        default=DEFAULT_PRESET,
        help=f"preset to start from: {', '.join(_preset_names(PRESETS))}",
    )
    parser.add_argument("--config-dir", "-cd", default=PRESETS, type=Path, help="folder of presets")
    return parser


def _options_help() -> str:
    """Every option with its default and its sentence, two lines each."""
    lines = [
        f"  {option.key}={'null' if option.default is None else option.default}\n"
        f"      ({option.type_name}) {option.doc}"
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
    ConfigStore.instance().store(name="config_schema", node=Config)
    search_path = f"hydra.searchpath=[file://{PRESETS}]"
    try:
        with initialize_config_dir(str(folder.resolve()), version_base="1.3"):
            return hydra_compose(name, overrides=[search_path, *arguments])
    except (HydraException, OmegaConfBaseException) as error:
        cause = " ".join(str(error).splitlines()[:2])
        fix = f"correct {folder / name}.yaml or the options given"
        raise ConfigError(explain(f"preset {name}", cause, "options of verl/config/", fix)) from (
            error
        )


def _refuse_missing(config: DictConfig) -> None:
    """Refuse options without default that nobody gave."""
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        fix = "add " + " ".join(f"{key}=…" for key in missing)
        raise ConfigError(explain(", ".join(missing), "nothing", "a value each", fix))
