"""A reader's terminal, in which the blocks of a page are run unchanged, one after another.

Variables and an activated environment remain for the next block. A server in the background is
stopped when the next one is started, and at the end.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from verl.ports import free_port

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"# ([\w./]+\.\w+)\n")
"""First line of a block that is the content of the file with this name."""


def blocks(page: Path) -> list[tuple[str, str]]:
    """Return language and text of the page's blocks, in order."""
    return BLOCK.findall(page.read_text(encoding="utf-8"))


@dataclass
class Terminal:
    """A shell in the folder `checkout`, with `variables` in addition to PATH and HOME."""

    checkout: Path
    variables: dict[str, str]
    shells: list[subprocess.Popen[bytes]] = field(default_factory=list)
    """Shells of the blocks, some with processes in the background."""
    port: str = ""
    """Port used instead of 8000."""

    def __post_init__(self) -> None:
        self.port = str(free_port())

    def run_page(self, page: Path) -> str:
        """Run the blocks of a page and write its files; returns the output."""
        outputs = []
        for language, text in blocks(page):
            file = FILE.match(text)
            if file:
                (self.checkout / file[1]).write_text(text)
            elif language == "bash":
                outputs.append(self.run_checked(text))
            elif language == "python":
                (self.checkout / "block.py").write_text(self.on_free_port(text))
                outputs.append(self.run_checked("python -m tests.nightly.pages.program block.py"))
        return "".join(outputs)

    def run_checked(self, block: str) -> str:
        """Run a block; returns its output. Raises AssertionError with the output if it fails."""
        status, output = self.run(block)
        assert status == 0, f"{block}\n{output[-4000:]}"
        return output

    def run(self, block: str) -> tuple[int, str]:
        """Run a block; returns its exit status and output."""
        if "retrieval_launch.sh" in block:
            self.stop()
        url = f"http://127.0.0.1:{self.port}"
        environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        environment |= {"PORT": self.port, "RETRIEVER_URL": f"{url}/retrieve", **self.variables}
        text = self.on_free_port(block).replace("sleep 5", "sleep 1")
        state, log = self.checkout / "state.sh", self.checkout / "log"
        script = f"[[ ! -e {state} ]] || source {state}\n{text}\nexport -p > {state}\n"
        with log.open("w") as file:
            shell = subprocess.Popen(
                ["bash", "-euc", script], cwd=self.checkout, env=environment,
                stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            self.shells.append(shell)
            status = shell.wait(400)
        return status, log.read_text()

    def on_free_port(self, block: str) -> str:
        """Return a block with this terminal's port instead of 8000."""
        return block.replace("127.0.0.1:8000", f"127.0.0.1:{self.port}")

    def stop(self) -> None:
        """Stop all processes in the background."""
        for shell in self.shells:
            try:
                os.killpg(shell.pid, signal.SIGTERM)
            except ProcessLookupError:
                continue
        self.shells.clear()
