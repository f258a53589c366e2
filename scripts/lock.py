"""Writes the versions in an environment as constraints to requirements.lock: `make lock`.

The lock describes the environment in which the test suite ran, so it is read from there and not
resolved again. It has names and versions only: no index, no folder, no machine-specific build.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
HASHES = ROOT / "requirements.sha256"
"""The same versions with the hashes of all their files, from the package index."""
TOOLS = {"pip", "pip-tools", "setuptools", "wheel", "uv", "build", "pyproject_hooks"}
"""Installation tools, which are not locked."""
HEAD = (
    "# What the CPU suite ran with; written by `make lock`, read by `make install` (CPU builds).\n"
)


def pins(frozen: str) -> list[str]:
    """Return the `name==version` lines of `pip freeze`, without tools and build tags (`+cpu`)."""
    lines = (re.fullmatch(r"([\w.-]+)==([^+\s]+)(?:\+\S+)?", line) for line in frozen.split("\n"))
    kept = [f"{pin[1]}=={pin[2]}" for pin in lines if pin and pin[1].lower() not in TOOLS]
    return sorted(kept, key=str.lower)


def main() -> None:
    """Write the lock and the hashes for the environment of this interpreter."""
    command = [sys.executable, "-m", "pip", "freeze", "--all", "--exclude-editable"]
    frozen = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    LOCK.write_text(HEAD + "".join(f"{pin}\n" for pin in pins(frozen)), encoding="ascii")
    options = ["--no-deps", "--generate-hashes", "--no-header", "--no-annotate", "--quiet"]
    command = [sys.executable, "-m", "uv", "pip", "compile", *options, str(LOCK), "-o", str(HASHES)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
