"""The command line of training answers a mistake before it imports what trains."""

import subprocess
import sys

PROGRAM = """
import sys
from verl.trainer import main_ppo
status = main_ppo.main(sys.argv[1:])
heavy = {"torch", "ray", "transformers", "vllm", "datasets"} & set(sys.modules)
print(status, sorted(heavy))
"""


def test_a_mistyped_option_imports_nothing_heavy() -> None:
    """The answer comes in under a second: torch, Ray, transformers and vLLM stay out of it."""
    command = [sys.executable, "-c", PROGRAM, "trainer.totl_epochs=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == "2 []\n", done.stderr
    assert "did you mean trainer.total_epochs?" in done.stderr
