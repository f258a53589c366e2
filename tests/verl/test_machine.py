"""What a machine has, as a run asks it."""

import os
import subprocess
import sys
from pathlib import Path


def test_a_script_without_a_main_guard_asks_for_devices_once(tmp_path: Path) -> None:
    """The process that asks the GPUs does not begin the user's script again, and bears what that
    put into sys.path and what every Python prints here as it starts."""
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
