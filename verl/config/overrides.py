"""`key=value` arguments before Hydra sees them: plus signs, old names, unknown keys, types.

The names of the scripts and YAML files of the original and veRL all mean here what they meant
there. An option may have another name here (`ALIASES`), have no effect any more and say so once, or
be refused with what to give instead (`LEGACY`); `legacy.yaml` lists them.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl.config import Config
from verl.config.algorithm import COMPAT_PRESETS
from verl.config.known import known_options, known_sections, to_argument
from verl.errors import ConfigError, explain

logger = logging.getLogger(__name__)

_warned: set[str] = set()
_FILE: Mapping[str, Any] = yaml.safe_load(
    Path(__file__).with_name("legacy.yaml").read_text("utf-8")
)
ALIASES: Mapping[str, str] = _FILE["aliases"]
"""Other names of our options and sections."""


@dataclass(frozen=True)
class Legacy:
    """An option without effect; `silent` are the values that ask for nothing else than we do."""

    names: str
    """Several for one advice; `{a,b}` stands for each of them. A name covers all below it."""
    advice: str
    silent: tuple[Any, ...]
    is_refused: bool
    """Any other value fails instead of warning: without it the run would not be the one meant."""


def expand(names: str) -> Iterator[str]:
    """The dotted names that a row's names stand for.

    *Example*: `"x.{a,b} y"` gives `x.a`, `x.b` and `y`.
    """
    for name in names.split():
        found = re.search(r"\{(.*?)\}", name)
        if found is None:
            yield name
            continue
        for part in found[1].split(","):
            yield from expand(name.replace(found[0], part, 1))


LEGACY_OPTIONS = [
    Legacy(row["names"], row["advice"], (*row.get("silent", ()), None), is_refused="refused" in row)
    for row in _FILE["without_effect"]
]
LEGACY: Mapping[str, Legacy] = {name: row for row in LEGACY_OPTIONS for name in expand(row.names)}
"""What has no effect here, by dotted name; some are still options of `verl.config`."""


def current_name(given: str) -> str:
    """Our name of an option that was given under another one."""
    for other, ours in ALIASES.items():
        if given == other or given.startswith(f"{other}."):
            return ours + given.removeprefix(other)
    return given


def find(key: str) -> Legacy | None:
    """What is known of an option without effect, or of a section that it stands in."""
    while key and key not in LEGACY:
        key = key.rpartition(".")[0]
    return LEGACY.get(key)


def normalise(arguments: Sequence[str], groups: Collection[str] = ()) -> list[str]:
    """Arguments as Hydra shall see them: known keys, no plus signs, checked types.

    What chooses from one of the `groups` of presets (`+hardware=8x80`) is left to Hydra. Order is
    kept, so the last of several values for one key wins. Raises ConfigError.
    """
    parsed = [parse(argument) for argument in arguments]
    return [text for override in parsed for text in _normalise_one(override, groups)]


def runs(arguments: Sequence[str]) -> Iterator[tuple[list[str], str]]:
    """The arguments of each run of a sweep (`trainer.seed=0,1,2`), and what it differs in."""
    choices, swept = [], []
    for override in (parse(argument, may_sweep=True) for argument in arguments):
        values, key = [str(override.input_line)], override.get_key_element()
        swept.append(override.is_sweep_override())
        if swept[-1]:
            values = [f"{key}={value}" for value in override.sweep_string_iterator()] or values
        choices.append(values)
    for chosen in itertools.product(*choices):
        label = ",".join(text.lstrip("+") for text in itertools.compress(chosen, swept))
        yield list(chosen), label.replace("/", "_")


def parse(argument: str, may_sweep: bool = False) -> Override:
    """One `key=value` by Hydra's grammar; what is none, or would start a sweep, is refused."""
    if "=" not in argument or argument.startswith("~"):
        fix = "see --help for the keys"
        raise ConfigError(explain("argument", repr(argument), "key=value", fix))
    key, value = argument.split("=", 1)
    try:
        override = _parser().parse_override(argument)
    except (HydraException, ValueError, RecursionError) as error:  # thousands of digits, or of [
        expected = "a value of Hydra's override grammar"
        fix = f"quote it for the parser as well: '{key}=\"…\"'"
        raise ConfigError(explain(key, short_repr(value), expected, fix)) from error
    if override.is_sweep_override() and not may_sweep:
        fix = f"a list is {key}=[{value}]; --multirun makes a run of each"
        raise ConfigError(explain(key, value, "one value", fix))
    return override


def short_repr(value: object) -> str:
    """A value in an error, up to a length that can be read."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def translate(given: str, value: Any) -> dict[str, Any]:
    """The options here that a name and its value stand for; none where they have no effect.

    Raises ConfigError for what is no option, and for what is refused.
    """
    key = current_name(given)
    legacy = find(key)
    if legacy is not None:
        _warn(given, value, legacy)
        return {}
    if given == "actor_rollout_ref.rollout.n" and value == 1:
        return {}  # the original multiplies n by n_agent, so 1 changes nothing
    if given == "compat" and not isinstance(value, dict):
        return _compat(value)
    if key not in known_options() and key not in known_sections():
        raise unknown_key(given)
    return {key: value}


def _normalise_one(override: Override, groups: Collection[str]) -> Iterator[str]:
    """The argument under its name here, or nothing where it is no option here."""
    text = str(override.input_line)
    if override.key_or_group in groups:
        yield text
        return
    given = override.value()
    for key, value in translate(override.key_or_group, given).items():
        check_type(key, value)
        # As it was typed: quotes and interpolations are Hydra's, and so is ++ for a mapping.
        plus = "++" * (isinstance(value, dict) and key in known_options())
        yield f"{plus}{key}={text.split('=', 1)[1] if value is given else to_argument(value)}"


def _compat(name: Any) -> dict[str, Any]:
    """The switches that `compat=NAME` stands for; one given after it wins."""
    if not isinstance(name, str) or name not in COMPAT_PRESETS:
        known = f"one of {', '.join(COMPAT_PRESETS)}"
        fix = "compat=search_r1, or one switch, such as compat.sampled_validation=true"
        raise ConfigError(explain("compat", repr(name), known, fix))
    switches = [key for key in known_options() if key.startswith("compat.")]
    return {key: key.removeprefix("compat.") in COMPAT_PRESETS[name] for key in switches}


def unknown_key(key: str) -> ConfigError:
    """The error for a key that is no option, with the nearest that is one."""
    names = [*known_options(), *ALIASES]
    alike = [name for name in names if name.rpartition(".")[2] == key.rpartition(".")[2]]
    near = difflib.get_close_matches(key, alike or names, n=1, cutoff=0.0 if alike else 0.5)
    hint = f"did you mean {near[0]}?" if near else "see --help for all keys"
    return ConfigError(explain("unknown option", key, "a key of verl/config/", hint))


def check_type(key: str, value: Any, schema: DictConfig | None = None) -> None:
    """Set a value in `schema`, or in one to try values on; refuse what its type cannot take."""
    try:
        OmegaConf.update(_schema() if schema is None else schema, key, value, merge=True)
    except OmegaConfBaseException as error:
        option = known_options().get(key)
        expected = option.type_name if option else "options of this section"
        fix = f"for example {key}={to_argument(option.default)}" if option else "see --help"
        raise ConfigError(explain(key, short_repr(value), expected, fix)) from error


@functools.cache
def _parser() -> OverridesParser:
    return OverridesParser.create()


@functools.cache
def _schema() -> DictConfig:
    """A config to try values on; its types matter, its values do not."""
    schema: DictConfig = OmegaConf.structured(Config)
    return schema


def _warn(key: str, value: Any, legacy: Legacy) -> None:
    """One warning per key and process; ConfigError where the run would be another without it."""
    if value in legacy.silent:
        return
    if legacy.is_refused:
        words = [to_argument(allowed) for allowed in legacy.silent if allowed not in (None, {})]
        expected = " or ".join([*words, "nothing"])
        raise ConfigError(explain(key, repr(value), expected, legacy.advice))
    if key in _warned:
        return
    _warned.add(key)
    logger.warning("%s=%s has no effect any more: %s", key, value, legacy.advice)
