"""The services and machines of a campaign's run, and how each of them is disturbed."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from example.geography import CORPUS
from search_r1.retrieval.local_server import LocalServer
from tests import test_multinode as multinode
from tests.machines import Machine, are_possible, cut, plug, reconnect, two_machines
from tests.nightly.proofs.campaign.clock import Clock
from tests.nightly.proofs.campaign.disk import SmallDisk
from tests.nightly.proofs.campaign.faults import (
    AT_THE_RETRIEVER,
    OF_A_NODE,
    ON_THE_MACHINE,
    Fault,
    Kind,
)
from tests.nightly.proofs.campaign.proxy import FaultyProxy

DAY_S = 86_400
UNTIL_ENDED_S = 60.0
"""Maximum seconds of a full or read-only disk, or another corpus, if the run does not stop."""


class Run(Protocol):
    """The attributes of a run that faults use."""

    folder: Path

    @property
    def status(self) -> int | None: ...


Strike = Callable[[Fault, Run], bool]
"""Causes a fault and undoes it; returns whether the run may have been affected."""


@dataclass
class World:
    """The environment of runs, and the faults that it can cause."""

    url: str
    """Address of the retriever."""
    folder: Path
    """Folder of the disturbed run."""
    options: tuple[str, ...]
    strikes: Mapping[Kind, Strike]
    """Function for each kind of fault that this machine can cause."""
    command: Callable[[list[str]], list[str]] = list
    """Adapts a command to run in this environment."""


def wait_for_end(run: Run, seconds: float) -> None:
    """Wait until the run has ended, up to `seconds`."""
    deadline = time.monotonic() + seconds
    while run.status is None and time.monotonic() < deadline:
        time.sleep(0.05)


@contextlib.contextmanager
def retriever(out: Path) -> Iterator[World]:
    """Provide a proxy in front of the retriever, and another retriever with half of the corpus."""
    half = out / "other_corpus.jsonl"
    lines = CORPUS.read_text(encoding="utf-8").splitlines(keepends=True)
    half.write_text("".join(lines[::2]), encoding="utf-8")
    flags = ["--retriever_name", "bm25", "--corpus_path"]
    other = LocalServer([*flags, str(half)])
    with LocalServer([*flags, str(CORPUS)]) as server, FaultyProxy(server.port) as proxy:

        def break_proxy(fault: Fault, _: Run) -> bool:
            return proxy.break_for(fault.kind, fault.seconds) > 0

        def kill_server(fault: Fault, _: Run) -> bool:
            server.kill()
            met = proxy.break_for(fault.kind, fault.seconds)
            server.start()
            return met > 0

        def change_corpus(fault: Fault, run: Run) -> bool:
            with other:
                met = proxy.break_for(Kind.DIES, 0.5)
                proxy.port = other.port
                wait_for_end(run, UNTIL_ENDED_S)
                proxy.port = server.port
            return met > 0

        strikes: dict[Kind, Strike] = dict.fromkeys(AT_THE_RETRIEVER, break_proxy)
        strikes |= {Kind.DIES: kill_server, Kind.OTHER_CORPUS: change_corpus}
        yield World(proxy.url, out / "disturbed", (), strikes)


@contextlib.contextmanager
def machine(out: Path) -> Iterator[World]:
    """Provide a separate disk and clock for the run; kills and freezes need only its processes."""
    clock = Clock(out)
    server = LocalServer(["--retriever_name", "bm25", "--corpus_path", str(CORPUS)])
    with server, SmallDisk(out / "disk") as disk:

        def fill_disk(_: Fault, run: Run) -> bool:
            disk.fill()
            wait_for_end(run, UNTIL_ENDED_S)
            disk.free()
            return True

        def lock_folder(_: Fault, run: Run) -> bool:
            disk.lock(run.folder)
            wait_for_end(run, UNTIL_ENDED_S)
            disk.unlock(run.folder)
            return True

        def change_clock(fault: Fault, _: Run) -> bool:
            clock.set_offset(DAY_S if fault.number % 2 else -DAY_S)
            time.sleep(fault.seconds)
            clock.set_offset(0)
            return True

        strikes: dict[Kind, Strike] = {}
        if disk.available:
            strikes |= {Kind.DISK_FULL: fill_disk, Kind.READ_ONLY: lock_folder}
        if clock.available:
            strikes[Kind.CLOCK] = change_clock
        yield World(f"{server.url}/retrieve", disk.folder / "run", (), strikes, clock.command)


@contextlib.contextmanager
def nodes(out: Path) -> Iterator[World]:
    """Provide a cluster of two machines with a rank and an engine each; faults hit the second."""
    if not are_possible():
        yield World("", out, (), {})
        return
    shutil.copy(CORPUS, out / "corpus.jsonl")
    with two_machines(out) as (first, second):
        # The head must keep its address when the cable goes away with the second machine.
        first.run("ip", "address", "add", f"{first.address}/32", "dev", "lo")
        multinode.start_retriever(first, out)
        multinode.start_retriever(second, out)
        multinode.start_cluster(first, second)

        def power_off(fault: Fault, _: Run) -> bool:
            second.switch_off()
            time.sleep(fault.seconds)
            second.switch_on()
            plug(first, second)
            multinode.start_retriever(second, out)
            multinode.start_worker(first, second)
            return True

        def disconnect(fault: Fault, _: Run) -> bool:
            cut(second)
            time.sleep(fault.seconds)
            reconnect(second)
            return True

        options = ("trainer.nnodes=2", "actor_rollout_ref.rollout.num_replicas=2")
        strikes: dict[Kind, Strike] = {Kind.NODE_OFF: power_off, Kind.NODE_CUT: disconnect}
        yield World(multinode.RETRIEVER, out / "disturbed", options, strikes, on(first))


def on(head: Machine) -> Callable[[list[str]], list[str]]:
    """Return a function that adapts a command to run on the head of a cluster."""
    env = {**multinode.ENV, "RAY_ADDRESS": f"{head.address}:{multinode.RAY_PORT}"}
    settings = [f"{name}={value}" for name, value in env.items()]
    return lambda words: head.command("env", *settings, *words)


LEGS = {
    "retriever": (retriever, AT_THE_RETRIEVER),
    "machine": (machine, ON_THE_MACHINE),
    "nodes": (nodes, OF_A_NODE),
}
"""World and kinds of faults of each leg. Faults of machine and nodes change no result; faults of
the retriever leave rounding differences, because requests share batches with other requests."""
