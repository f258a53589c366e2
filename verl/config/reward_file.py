"""veRL's names for a user's reward, `custom_reward_function.path` and `.name`.

The two options become one of ours, `reward_model.name=path.py:name`, so they are joined before each
option is translated alone (`verl.config.overrides`).
"""

from collections.abc import Iterable, Sequence
from typing import Any

from verl.errors import ConfigError, explain

SECTIONS = ("custom_reward_function", "reward.custom_reward_function")
DEFAULT_FUNCTION = "compute_score"
REWARD = "reward_model.name"


def is_of_reward_file(key: str) -> bool:
    """Whether an option names the file or the function of a user's reward."""
    section, _, name = key.rpartition(".")
    return section in SECTIONS and name in ("path", "name")


def reward_file(options: Iterable[tuple[str, Any]]) -> dict[str, str]:
    """Return our option for those of veRL among `options` (key, value), or nothing without a file.

    The last value of each wins. Raises ConfigError for a value that is no name, or for a second
    reward in `reward_model.name`.
    """
    given = list(options)
    path = _last(given, "path")
    function = _last(given, "name") or DEFAULT_FUNCTION
    if path is None:
        return {}
    named = f"{path}:{function}"
    other = next((value for key, value in reversed(given) if key == REWARD), named)
    if other != named:
        fix = f"leave out one of them; {REWARD}={named} names that function, too"
        raise ConfigError(
            explain("custom_reward_function", f"{REWARD}={other} as well", "one", fix)
        )
    return {REWARD: named}


def _last(options: Sequence[tuple[str, Any]], name: str) -> str | None:
    """Return the last value of `custom_reward_function.NAME`; None if it is null or not given."""
    keys = [f"{section}.{name}" for section in SECTIONS]
    key, value = next((item for item in reversed(options) if item[0] in keys), ("", None))
    if value is not None and not (isinstance(value, str) and value.strip()):
        expected = "a file" if name == "path" else "the name of a function in that file"
        raise ConfigError(explain(key, repr(value), expected, f"{key}=null, or correct it"))
    return value
