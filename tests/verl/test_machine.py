"""What a machine has, as a run asks it."""

import subprocess
import sys
from pathlib import Path


def test_a_script_without_a_main_guard_asks_for_devices_once(tmp_path: Path) -> None:
    """The process that asks the GPUs does not begin the user's script again."""
    script = tmp_path / "own.py"
    script.write_text(
        "print('begun')\nfrom verl.machine import Machine\n"
        "print(isinstance(Machine.now(with_devices=True).devices, tuple))\n"
    )
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["begun", "True"]
