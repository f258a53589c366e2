"""Reads options by name: old names, names of veRL, unknown keys and types.

Options of the scripts and YAML files of the original Search-R1 and of veRL are accepted. Some have
another name here (`ALIASES`); others have no effect, which is logged once, or are refused with
advice (`LEGACY`). `legacy.yaml` lists them all.
"""

import functools
import itertools
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl.config.known import known_options, known_sections, to_argument
from verl.config.reward_file import is_of_reward_file, reward_file
from verl.errors import ConfigError, did_you_mean, explain

logger = logging.getLogger(__name__)

OFF = "off"
"""A choice of several options, which YAML reads as false unless it is quoted."""
VERLS_GROUP_SIZE, MINI_BATCH = "actor_rollout_ref.rollout.n", ".ppo_mini_batch_size"
_warned: set[str] = set()
_FILE: Mapping[str, Any] = yaml.safe_load(
    Path(__file__).with_name("legacy.yaml").read_text("utf-8")
)
ALIASES: Mapping[str, str] = _FILE["aliases"]
"""Alternative names of options and sections, mapped to their names in `verl.config`."""


@dataclass(frozen=True)
class Legacy:
    """Options of the original or veRL that have no effect here, with common advice."""

    names: str
    """Dotted names of options or whole sections, with spaces between; `x.{a,b}`: `x.a`, `x.b`."""
    advice: str
    silent: tuple[Any, ...]
    """Values that need no warning, because they ask for what is done anyway."""
    is_refused: bool
    """Whether other values are an error: ignoring them would change the meaning of the run."""


def expand(names: str) -> Iterator[str]:
    """Yield the names of a `Legacy.names` string: `"x.{a,b} y"` gives `x.a`, `x.b` and `y`."""
    for name in names.split():
        braces = re.search(r"\{(.*?)\}", name)
        if braces is None:
            yield name
            continue
        for alternative in braces[1].split(","):
            yield from expand(name.replace(braces[0], alternative, 1))


LEGACY_OPTIONS = [
    Legacy(entry["names"], entry["advice"], (*entry.get("silent", ()), None), "refused" in entry)
    for entry in _FILE["without_effect"]
]
LEGACY: Mapping[str, Legacy] = {
    name: legacy for legacy in LEGACY_OPTIONS for name in expand(legacy.names)
}
"""Options without effect by dotted name; some are still options of `verl.config`."""


def current_name(given: str) -> str:
    """Return the name in `verl.config` of an option that may be given under an alias."""
    for alias, name in ALIASES.items():
        if given == alias or given.startswith(f"{alias}."):
            return name + given.removeprefix(alias)
    return given


def find(key: str) -> Legacy | None:
    """Return the `LEGACY` entry of an option or of the section that contains it, if any."""
    while key and key not in LEGACY:
        key = key.rpartition(".")[0]
    return LEGACY.get(key)


def apply(options: Iterable[tuple[str, Any]], config: DictConfig) -> None:
    """Set options (key, value) in order, each under its current name. Raises ConfigError."""
    for key, value in translate_all(options):
        check_type(key, value, config)


def translate_all(options: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield the option of `verl.config` and its value for each of `options`; see `translate`."""
    given = list(options)
    _warn_of_verls_batches(dict(given))
    for key, value in given:
        if not is_of_reward_file(key):
            yield from translate(key, value).items()
    yield from reward_file(given).items()


def _warn_of_verls_batches(given: Mapping[str, Any]) -> None:
    """Warn, once per process, of mini-batches beside veRL's name of the group size."""
    size, sizes = given.get(VERLS_GROUP_SIZE, 1), [n for n in given if n.endswith(MINI_BATCH)]
    if size != 1 and sizes and MINI_BATCH not in _warned:
        _warned.add(MINI_BATCH)
        logger.warning(
            "%s counts trajectories here, in veRL prompts; fix: if it is of a veRL command, "
            "multiply it by %s=%s", " and ".join(sizes), VERLS_GROUP_SIZE, size,
        )  # fmt: skip


def runs(arguments: Sequence[str]) -> Iterator[tuple[list[str], str]]:
    """Yield each run of a sweep (`trainer.seed=0,1,2`): all its arguments, and the swept ones."""
    choices, is_swept = list[list[str]](), list[bool]()
    for argument in arguments:
        override = parse(argument, may_sweep=True)
        values = [str(override.input_line)]
        if override.is_sweep_override():
            key = override.get_key_element()
            values = [f"{key}={value}" for value in override.sweep_string_iterator()] or values
        choices.append(values)
        is_swept.append(override.is_sweep_override())
    for chosen in itertools.product(*choices):
        label = ",".join(text.lstrip("+") for text in itertools.compress(chosen, is_swept))
        yield list(chosen), label.replace("/", "_")


def parse(argument: str, may_sweep: bool = False) -> Override:
    """Parse `key=value` with Hydra. Raises ConfigError, also for a sweep unless `may_sweep`."""
    if "=" not in argument or argument.startswith("~"):
        fix = "see --help-all for the keys"
        raise ConfigError(explain("argument", repr(argument), "key=value", fix))
    key, value = argument.split("=", 1)
    try:
        override = _parser().parse_override(argument)
    # ValueError: thousands of digits; RecursionError: thousands of brackets.
    except (HydraException, ValueError, RecursionError) as error:
        expected = "a value of Hydra's override grammar"
        fix = f"quote it for the parser as well: '{key}=\"…\"'"
        raise ConfigError(explain(key, short_repr(value), expected, fix)) from error
    if override.is_sweep_override() and not may_sweep:
        fix = f"a list is {key}=[{value}]; --multirun starts one run per value"
        raise ConfigError(explain(key, value, "one value", fix))
    return override


def value_of(override: Override) -> Any:
    """Return the value given; of an option that is a text, a number as it was written."""
    value, key = override.value(), current_name(str(override.key_or_group))
    option = known_options().get(key)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if option is None or not is_number or option.type_name not in ("str", "str | null"):
        return value
    return str(override.input_line).split("=", 1)[1]


def short_repr(value: object) -> str:
    """Return the repr of a value for an error message, cut to 200 characters."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def translate(given: str, value: Any) -> dict[str, Any]:
    """Map an option of the user to options of `verl.config`; empty if it has no effect here.

    Raises ConfigError for an unknown option, and for one that is refused.
    """
    key = current_name(given)
    legacy = find(key)
    if legacy is not None:
        _warn(given, value, legacy)
        return {}
    if given == VERLS_GROUP_SIZE and value == 1:
        return {}  # the original multiplies n by n_agent, so that 1 changes nothing
    is_known = key in known_options() or key in known_sections() or mapping_of(key) is not None
    if not is_known:
        raise unknown_key(given)
    option = known_options().get(key)
    if value is False and option is not None and OFF in option.limits.choices:
        return {key: OFF}
    return {key: value}


def mapping_of(key: str) -> str | None:
    """Return the option that is a mapping with the entry `key`, such as `…engine_kwargs.x`."""
    parent = key.rpartition(".")[0]
    if not parent or parent in known_sections():
        return None
    option = known_options().get(parent)
    is_mapping = option is not None and option.type_name == "dict[str, Any]"
    return parent if is_mapping else mapping_of(parent)


def unknown_key(key: str) -> ConfigError:
    """Return the error for an unknown key, which suggests the nearest known one."""
    names = [*known_options(), *ALIASES]
    alike = [name for name in names if name.rpartition(".")[2] == key.rpartition(".")[2]]
    cutoff = 0.0 if alike else 0.5
    fix = did_you_mean(key, alike or names, "see --help-all for all keys", cutoff)
    if (name := current_name(key)) != key:  # an attribute of a configuration made in Python
        fix = f"its name is {name}"
    return ConfigError(explain("unknown option", key, "a key of verl/config/", fix))


def check_type(key: str, value: Any, config: DictConfig) -> None:
    """Set a value in `config`. Raises ConfigError for a wrong type."""
    try:
        if isinstance(value, Mapping) and key in known_options():  # the last value wins, whole
            OmegaConf.update(config, key, {}, merge=False)
        OmegaConf.update(config, key, value, merge=True, force_add=mapping_of(key) is not None)
    except OmegaConfBaseException as error:
        option = known_options().get(key)
        expected = option.type_name if option else "options of this section"
        fix = f"for example {key}={to_argument(option.default)}" if option else "see --help-all"
        raise ConfigError(explain(key, short_repr(value), expected, fix)) from error


@functools.cache
def _parser() -> OverridesParser:
    return OverridesParser.create()


def _warn(key: str, value: Any, legacy: Legacy) -> None:
    """Warn of an option without effect, once per key and process. Raises ConfigError if refused."""
    if value in legacy.silent:
        return
    if legacy.is_refused:
        allowed = [to_argument(silent) for silent in legacy.silent if silent not in (None, {})]
        expected = " or ".join([*allowed, "nothing"])
        raise ConfigError(explain(key, repr(value), expected, legacy.advice))
    if key in _warned:
        return
    _warned.add(key)
    logger.warning("%s=%s has no effect any more: %s", key, value, legacy.advice)
