"""A real Slurm for tests: munged, slurmctld and one slurmd per simulated node on this machine.

The programs of Debian's packages run without a service manager; nothing outside a temporary folder
is changed, and every process is ended by its id.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from verl.ports import free_port

ROOT = Path(__file__).resolve().parents[3]
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
PACKAGES = "apt-get install munge slurmctld slurmd slurm-client"
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
JobRequeue=1
KillWait=20
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus}\n"


def search_path() -> str:
    """Return PATH with the folders of daemons, which a user's PATH lacks."""
    return os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/usr/local/sbin"])


def missing_programs() -> list[str]:
    """Return the programs of Slurm that this machine lacks."""
    return [name for name in PROGRAMS if shutil.which(name, path=search_path()) is None]


def free_ports(num: int) -> list[int]:
    """Return different ports on which nothing listens."""
    ports: set[int] = set()
    while len(ports) < num:
        ports.add(free_port())
    return list(ports)


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait until `condition` holds; fail with `what` after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds:.0f} s"
        time.sleep(0.3)


@dataclass(frozen=True)
class Cluster:
    """A running Slurm, and the environment for its commands."""

    folder: Path
    environment: dict[str, str]

    def command(self, *command: str, env: Mapping[str, str] | None = None) -> str:
        """Return the output of one of Slurm's commands."""
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**self.environment, **(env or {})},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def list(self, *command: str) -> list[str]:
        """Return the words that sinfo or squeue print; none while slurmctld does not answer yet."""
        line, environment = [*command, "--noheader"], self.environment
        done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=60)
        return sorted(done.stdout.split())

    def resume(self, node: str) -> None:
        """Put a node back into service, unless it has registered by itself."""
        if node in self.list("sinfo", "--states=down", "--Node", "--format=%N"):
            self.command("scontrol", "update", f"NodeName={node}", "State=RESUME")

    def submit(self, recipe: str, *arguments: str, options: Sequence[str] = (),
               env: Mapping[str, str] | None = None) -> str:  # fmt: skip
        """Submit a recipe of scripts/slurm; returns the job's id."""
        output = f"--output={self.folder}/%j.out"
        line = ["sbatch", "--parsable", output, *options, f"scripts/slurm/{recipe}", *arguments]
        return self.command(*line, env=env).strip()

    def facts(self, job: str) -> dict[str, str]:
        """Return Slurm's description of a job: JobState, Restarts, ExitCode, Reason ..."""
        fields = self.command("scontrol", "show", "job", job, "--oneliner").split()
        return dict(field.split("=", 1) for field in fields if "=" in field)

    def state(self, job: str) -> str:
        return self.facts(job)["JobState"]

    def log(self, job: str) -> str:
        """Return the output of the job so far."""
        path = self.folder / f"{job}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_log(self, job: str, text: str, seconds: float = 240) -> None:
        """Wait until the job has printed `text`."""
        self._wait(job, lambda: text in self.log(job), seconds, f"log with {text!r}")

    def wait_state(self, job: str, state: str, seconds: float = 240) -> None:
        """Wait until a job is in a state."""
        self._wait(job, lambda: self.state(job) == state, seconds, state)

    def wait_restart(self, job: str, restarts: int, seconds: float = 240) -> None:
        """Wait until the job is requeued, and release it before Slurm's delay of two minutes.

        Some seconds are needed: a node refuses a start in the second in which the last one ended.
        """

        def is_back() -> bool:
            facts = self.facts(job)
            return facts["Restarts"] == str(restarts) and facts["JobState"] == "PENDING"

        self._wait(job, is_back, seconds, f"restart {restarts}")
        self.command("scontrol", "update", f"JobId={job}", "StartTime=now+3")

    def _wait(self, job: str, is_so: Callable[[], bool], seconds: float, what: str) -> None:
        def is_decided() -> bool:
            return self.state(job) in OVER or is_so()

        try:
            wait_until(is_decided, seconds, what)
            wait_until(is_so, 30, f"{what} of a job that is over")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.facts(job)}\n{self.log(job)[-4000:]}") from None


@contextlib.contextmanager
def start_cluster(folder: Path, nodes: Sequence[str] = ("n1", "n2"), cpus: int = 8
                  ) -> Iterator[Cluster]:  # fmt: skip
    """Run a Slurm with simulated nodes of `cpus` CPUs each until the context ends."""
    environment = {**os.environ, "PATH": search_path(), "SLURM_CONF": str(folder / "slurm.conf")}
    cluster = Cluster(folder, environment)
    write_configuration(folder, nodes, cpus)
    with contextlib.ExitStack() as stack:
        stack.enter_context(daemon(cluster, "munged", "--foreground", "--force", "--num-threads=2",
                                   *munge_files(folder)))  # fmt: skip
        wait_until((folder / "munge.sock").exists, 10, "munged")
        stack.enter_context(daemon(cluster, "slurmctld", "-D", "-i"))
        for node in nodes:
            stack.enter_context(daemon(cluster, "slurmd", "-D", "-N", node))
        stack.callback(end_jobs, cluster)
        try:
            wait_until(lambda: cluster.list("sinfo", "--states=idle", "--Node", "--format=%N")
                       == sorted(nodes), 60, "nodes of Slurm")  # fmt: skip
        except AssertionError as error:
            logs = "".join(path.read_text()[-1500:] for path in folder.glob("*.log"))
            raise AssertionError(f"{error}\n{logs}") from None
        yield cluster


def end_jobs(cluster: Cluster) -> None:
    """Cancel the jobs of a failed test, since jobs outlive the daemons that started them."""
    if cluster.list("squeue", "--format=%A"):
        cluster.command("scancel", f"--user={os.getuid()}")
        wait_until(lambda: not cluster.list("squeue", "--format=%A"), 60, "end of all jobs")


def write_configuration(folder: Path, nodes: Sequence[str], cpus: int) -> None:
    """Write slurm.conf and munge's key; slurmds on one machine differ by name and port."""
    host, user = socket.gethostname(), pwd.getpwuid(os.getuid()).pw_name
    control, *ports = free_ports(1 + len(nodes))
    text = CONFIGURATION.format(host=host, port=control, user=user, folder=folder)
    for name, port in zip(nodes, ports, strict=True):
        text += NODE.format(name=name, host=host, port=port, cpus=cpus)
    folder.chmod(0o755)
    (folder / "state").mkdir()
    (folder / "slurm.conf").write_text(text)
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)


def munge_files(folder: Path) -> list[str]:
    """Return munged's flags that put all its files into our folder."""
    names = {"key-file": "key", "socket": "sock", "pid-file": "pid", "log-file": "log",
             "seed-file": "seed"}  # fmt: skip
    return [f"--{flag}={folder}/munge.{suffix}" for flag, suffix in names.items()]


@contextlib.contextmanager
def daemon(cluster: Cluster, name: str, *flags: str) -> Iterator[None]:
    """Run a daemon of Slurm in the foreground until the context ends."""
    with (cluster.folder / f"{name}{flags[-1].strip('-')[:3]}.log").open("wb") as log:
        # In a session of its own: ctrl-c in a terminal must not end it before its jobs are ended.
        process = subprocess.Popen(
            [name, *flags],
            env=cluster.environment,
            cwd=cluster.folder,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
