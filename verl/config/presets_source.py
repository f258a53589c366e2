"""Preset files as Hydra reads them, with the names of Search-R1 and veRL turned into those here."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.config_source import ConfigResult
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import Container, DictConfig, OmegaConf

from verl.config.known import flattened, known_options
from verl.config.overrides import name_here, translate

PRESETS = Path(__file__).parent / "presets"
OF_HYDRA = ("defaults", "hydra")


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
    for given, value in flattened(plain, is_whole=lambda key: name_here(key) in known_options()):
        for key, its_value in translate(given, value).items():
            OmegaConf.update(found, key, its_value, force_add=True)
    return found
