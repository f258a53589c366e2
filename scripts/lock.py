"""Write what an environment holds as constraints: `make lock` fills requirements.lock.

The lock is the environment that the suite ran in, so it is read from there and not resolved anew.
It names packages and versions only: no index, no folder, no build of one machine.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
HASHES = ROOT / "requirements.sha256"
"""The same versions with the hashes of all their files, as the package index tells them."""
TOOLS = {"pip", "pip-tools", "setuptools", "wheel", "uv", "build", "pyproject_hooks"}
"""They install, and are not installed for us."""
HEAD = (
    "# What the CPU suite ran with; written by `make lock`, read by `make install` (CPU builds).\n"
)


def pins(frozen: str) -> list[str]:
    """`name==version` lines of `pip freeze`, without tools and without a build's `+cpu`."""
    found = (re.fullmatch(r"([\w.-]+)==([^+\s]+)(?:\+\S+)?", line) for line in frozen.split("\n"))
    kept = [f"{pin[1]}=={pin[2]}" for pin in found if pin and pin[1].lower() not in TOOLS]
    return sorted(kept, key=str.lower)


def main() -> None:
    """Freeze the environment of this interpreter."""
    command = [sys.executable, "-m", "pip", "freeze", "--all", "--exclude-editable"]
    frozen = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    LOCK.write_text(HEAD + "".join(f"{pin}\n" for pin in pins(frozen)), encoding="ascii")
    options = ["--no-deps", "--generate-hashes", "--no-header", "--no-annotate", "--quiet"]
    command = [sys.executable, "-m", "uv", "pip", "compile", *options, str(LOCK), "-o", str(HASHES)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
