"""The memory of this machine, as a run reads it."""

import os
import subprocess
import sys
from pathlib import Path


def test_reading_devices_does_not_run_the_script_again(tmp_path: Path) -> None:
    """The child process that reads the GPUs does not execute the user's script again.

    It works with sys.path entries that are no strings, and with output of a sitecustomize.py.
    """
    (tmp_path / "sitecustomize.py").write_text("print('hello')\n")
    script = tmp_path / "own.py"
    script.write_text(
        "print('begun')\nimport sys\nfrom pathlib import Path\nsys.path.append(Path('/x'))\n"
        "from verl.machine import Machine\n"
        "print(isinstance(Machine.now(with_devices=True).devices, tuple))\n"
    )
    command = [sys.executable, str(script)]
    own = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=own)
    assert done.stdout.split() == ["hello", "begun", "True"]
