"""Python with packages that need other versions than ours."""

import os
import site
import subprocess
import venv
from collections.abc import Sequence

import pytest


def python_with(packages: Sequence[str], variable: str, folders: pytest.TempPathFactory) -> str:
    """Return the Python that `variable` names, or a new one whose packages come before ours."""
    if given := os.environ.get(variable):
        return given
    folder = folders.mktemp(variable.lower())
    venv.create(folder, with_pip=True)
    subprocess.run([folder / "bin/pip", "install", "-q", *packages], check=True)
    [installed] = folder.glob("lib/python3*/site-packages")
    (installed / "zz_ours.pth").write_text("\n".join(site.getsitepackages()))
    return str(folder / "bin/python")
