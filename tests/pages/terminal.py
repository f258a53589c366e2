"""A reader's terminal: the blocks of a page are typed one after another, as they stand.

Variables and the environment that a block activates stay for the next one. A server that runs in
the background is ended when the next one is started, and at the end.
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
"""A block that begins so is the file of that name."""


def blocks(page: Path) -> list[tuple[str, str]]:
    """The page's blocks: language and text, in order."""
    return BLOCK.findall(page.read_text(encoding="utf-8"))


@dataclass
class Terminal:
    """`checkout`: where it stands; `variables`: what each block has, beside PATH and HOME."""

    checkout: Path
    variables: dict[str, str]
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)
    port: str = ""

    def __post_init__(self) -> None:
        self.port = str(free_port())

    def read(self, page: Path) -> str:
        """Do what the page says; returns all that was said."""
        said = []
        for language, text in blocks(page):
            named = FILE.match(text)
            if named:
                (self.checkout / named[1]).write_text(text)
            elif language == "bash":
                said.append(self.type_in(text))
            elif language == "python":
                (self.checkout / "block.py").write_text(text)
                said.append(self.type_in("python -m tests.pages.program block.py"))
        return "".join(said)

    def type_in(self, block: str) -> str:
        """Run a block; returns what was said. Raises AssertionError with it where that fails."""
        status, said = self.run(block)
        assert status == 0, f"{block}\n{said[-4000:]}"
        return said

    def run(self, block: str) -> tuple[int, str]:
        """Run a block; returns its exit status and what was said."""
        if "retrieval_launch.sh" in block:
            self.end()
        url = f"http://127.0.0.1:{self.port}"
        environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        environment |= {"PORT": self.port, "RETRIEVER_URL": f"{url}/retrieve", **self.variables}
        text = block.replace("127.0.0.1:8000", f"127.0.0.1:{self.port}").replace(
            "sleep 5", "sleep 1"
        )
        state, log = self.checkout / "state.sh", self.checkout / "log"
        script = f"[[ ! -e {state} ]] || source {state}\n{text}\nexport -p > {state}\n"
        with log.open("w") as file:
            shell = subprocess.Popen(
                ["bash", "-euc", script], cwd=self.checkout, env=environment,
                stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            self.running.append(shell)
            status = shell.wait(400)
        return status, log.read_text()

    def end(self) -> None:
        """End what runs in the background."""
        for shell in self.running:
            try:
                os.killpg(shell.pid, signal.SIGTERM)
            except ProcessLookupError:
                continue
        self.running.clear()
