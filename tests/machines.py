"""Two simulated machines with separate networks, processes and shared memory.

Linux namespaces separate them as in a cluster. Files below `/` are common, as on a network file
system, unless something else is mounted there. Needs root. Switching a machine off kills all of
its processes.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

NETWORK = "10.213.77"
CABLE = "cable0"
OWN_MEMORY = ("/dev/shm", "/tmp/ray")


def are_possible() -> bool:
    """Whether this process may create namespaces, and the tools are installed."""
    tools = ("unshare", "nsenter", "setpriv", "ip", "mount", "taskset")
    if os.geteuid() != 0 or not all(shutil.which(tool) for tool in tools):
        return False
    return (
        subprocess.run(["unshare", "--net", "--mount", "--pid", "--fork", "true"]).returncode == 0
    )


@dataclass
class Machine:
    """Machine `number`, 1 or 2; its commands write their output to `log`."""

    number: int
    log: Path
    holder: subprocess.Popen[bytes] | None = None
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"{NETWORK}.{self.number}"

    @property
    def pid(self) -> int:
        """The process id of the machine's first process, outside of its namespace."""
        assert self.holder is not None, "the machine is off"
        children = Path(f"/proc/{self.holder.pid}/task/{self.holder.pid}/children")
        return int(children.read_text().split()[0])

    def switch_on(self) -> None:
        """Create the namespaces, with loopback and separate memory but no connection yet."""
        flags = ["--net", "--mount", "--pid", "--ipc", "--fork", "--mount-proc", "--kill-child"]
        # The machine's first process is killed with the tests, so that no machine remains.
        with_parent = ["setpriv", "--pdeathsig", "KILL"]
        self.holder = subprocess.Popen([*with_parent, "unshare", *flags, "sleep", "infinity"])
        end = time.monotonic() + 20
        while not self._is_up():
            assert time.monotonic() < end, "the namespaces did not come up"
            time.sleep(0.05)
        self.run("ip", "link", "set", "lo", "up")
        for folder in OWN_MEMORY:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.hide(Path(folder), size="8g")

    def _is_up(self) -> bool:
        try:
            return Path(f"/proc/{self.pid}/comm").read_text() == "sleep\n"
        except (OSError, IndexError):
            return False

    def hide(self, folder: Path, size: str = "1m") -> None:
        """Mount an empty folder over `folder`, on this machine only."""
        self.run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder))

    def command(self, *words: str) -> list[str]:
        """Return the command to run `words` on the machine, on a separate core if there are two."""
        core = sorted(os.sched_getaffinity(0))[(self.number - 1) % len(os.sched_getaffinity(0))]
        enter = ["nsenter", "--target", str(self.pid), "--net", "--mount", "--pid", "--ipc"]
        return [*enter, "taskset", "-c", str(core), *words]

    def run(self, *words: str) -> str:
        """Run a short command on the machine until it ends; return its output."""
        done = subprocess.run(self.command(*words), capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def start(self, *words: str, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start a command on the machine with `env` added; it is killed when the machine is."""
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                self.command(*words), stdout=log, stderr=log, env={**os.environ, **env}
            )
        self.started.append(process)
        return process

    def switch_off(self) -> None:
        """Kill every process of the machine at once, as a power failure does."""
        if self.holder is None:
            return
        os.kill(self.pid, signal.SIGKILL)
        for process in (*self.started, self.holder):
            process.wait(60)
        self.started.clear()
        self.holder = None


def plug(first: Machine, second: Machine) -> None:
    """Connect two machines that are on, after removing an earlier connection."""
    for machine in (first, second):
        machine.run("sh", "-c", f"ip link delete {CABLE} 2> /dev/null; true")
    ends = ["ip", "link", "add", CABLE, "netns", str(first.pid), "type", "veth",
            "peer", "name", CABLE, "netns", str(second.pid)]  # fmt: skip
    subprocess.run(ends, check=True, timeout=30)
    for machine in (first, second):
        machine.run("ip", "address", "add", f"{machine.address}/24", "dev", CABLE)
        machine.run("ip", "link", "set", CABLE, "up")


def cut(machine: Machine) -> None:
    """Disconnect the machine without notice: packets are lost."""
    machine.run("ip", "link", "set", CABLE, "down")


def reconnect(machine: Machine) -> None:
    """Connect the machine again."""
    machine.run("ip", "link", "set", CABLE, "up")


@contextmanager
def two_machines(logs: Path) -> Iterator[tuple[Machine, Machine]]:
    """Yield two connected machines, and switch them off at the end."""
    first, second = Machine(1, logs / "machine1.log"), Machine(2, logs / "machine2.log")
    try:
        first.switch_on()
        second.switch_on()
        plug(first, second)
        yield first, second
    finally:
        first.switch_off()
        second.switch_off()
