"""How to install the packages of an optional part: the project itself is on no registry."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The checkout, or the folder of an installed copy."""


def install_command(extra: str) -> str:
    """The command that installs an extra of pyproject.toml from the checkout."""
    if (ROOT / "pyproject.toml").is_file():
        return f"pip install -e '{ROOT}[{extra}]'"
    return f"pip install '.[{extra}]' in a checkout of Search-R1"
