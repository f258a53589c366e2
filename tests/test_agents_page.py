"""AGENTS.md: a tool, a reward and an engine are added from it alone."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
FILES = re.findall(r"```python\n# (own/\w+\.py)\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)


def test_what_the_page_says_works_as_written(tmp_path: Path) -> None:
    """Its files are written into a folder of their own, and its commands run there."""
    assert [name for name, _ in FILES] == [
        f"own/{name}.py" for name in ("tool", "reward", "engine", "test_own")
    ]
    (tmp_path / "own").mkdir()
    for name, text in FILES:
        (tmp_path / name).write_text(text, encoding="utf-8")
    shutil.copytree(ROOT / "example", tmp_path / "example", ignore=shutil.ignore_patterns("index"))
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
                   "PYTHONPATH": f"{tmp_path}:{ROOT}"}  # fmt: skip
    for command in COMMANDS:
        done = subprocess.run(["bash", "-ec", command], cwd=tmp_path, env=environment, check=False,
                              capture_output=True, text=True)  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout
