"""What a run of the campaign stands on, and how each part of it is broken."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from example.geography import CORPUS
from search_r1.search.local_server import LocalServer
from tests import test_multinode as multinode
from tests.machines import Machine, are_possible, cut, mend, plug, two_machines
from tests.proofs.campaign.clock import Clock
from tests.proofs.campaign.disk import SmallDisk
from tests.proofs.campaign.faults import AT_THE_RETRIEVER, OF_A_NODE, ON_THE_MACHINE, Fault, Kind
from tests.proofs.campaign.proxy import FaultyProxy

DAY_S = 86_400
UNTIL_ENDED_S = 60.0
"""How long a full or read-only disk, or another corpus, is left to a run that does not stop."""


class Run(Protocol):
    """What a fault needs of the run that it strikes."""

    folder: Path

    @property
    def status(self) -> int | None:
        """Exit status; None while it runs."""
        ...


Strike = Callable[[Fault, Run], bool]
"""Does what a fault says and undoes it; returns whether the run can have met it."""


@dataclass
class World:
    """Where runs are begun, and what can be done to them."""

    url: str
    """Where they search."""
    folder: Path
    """Where the disturbed one is kept."""
    options: tuple[str, ...]
    strikes: Mapping[Kind, Strike]
    """Without those that this machine cannot do."""
    command: Callable[[list[str]], list[str]] = list
    """What runs a command there."""


def wait_for_end(run: Run, seconds: float) -> None:
    """Wait until the run has ended, or as long as that."""
    deadline = time.monotonic() + seconds
    while run.status is None and time.monotonic() < deadline:
        time.sleep(0.05)


@contextlib.contextmanager
def retriever(out: Path) -> Iterator[World]:
    """A proxy before the retriever, and another retriever over half of its corpus."""
    half = out / "other_corpus.jsonl"
    lines = CORPUS.read_text(encoding="utf-8").splitlines(keepends=True)
    half.write_text("".join(lines[::2]), encoding="utf-8")
    flags = ["--retriever_name", "bm25", "--corpus_path"]
    other = LocalServer([*flags, str(half)])
    with LocalServer([*flags, str(CORPUS)]) as server, FaultyProxy(server.port) as proxy:

        def breaks(fault: Fault, _: Run) -> bool:
            return proxy.break_for(fault.kind, fault.seconds) > 0

        def dies(fault: Fault, _: Run) -> bool:
            server.kill()
            met = proxy.break_for(fault.kind, fault.seconds)
            server.start()
            return met > 0

        def is_another(fault: Fault, run: Run) -> bool:
            with other:
                met = proxy.break_for(Kind.DIES, 0.5)
                proxy.port = other.port
                wait_for_end(run, UNTIL_ENDED_S)
                proxy.port = server.port
            return met > 0

        strikes: dict[Kind, Strike] = dict.fromkeys(AT_THE_RETRIEVER, breaks)
        strikes |= {Kind.DIES: dies, Kind.OTHER_CORPUS: is_another}
        yield World(proxy.url, out / "disturbed", (), strikes)


@contextlib.contextmanager
def machine(out: Path) -> Iterator[World]:
    """A disk and a clock of the run's own; kills and stops need nothing more than its processes."""
    clock = Clock(out)
    server = LocalServer(["--retriever_name", "bm25", "--corpus_path", str(CORPUS)])
    with server, SmallDisk(out / "disk") as disk:

        def is_full(_: Fault, run: Run) -> bool:
            disk.fill()
            wait_for_end(run, UNTIL_ENDED_S)
            disk.free()
            return True

        def is_locked(_: Fault, run: Run) -> bool:
            disk.lock(run.folder)
            wait_for_end(run, UNTIL_ENDED_S)
            disk.unlock(run.folder)
            return True

        def jumps(fault: Fault, _: Run) -> bool:
            clock.set_wrong(DAY_S if fault.number % 2 else -DAY_S)
            time.sleep(fault.seconds)
            clock.set_wrong(0)
            return True

        strikes: dict[Kind, Strike] = {}
        if disk.available:
            strikes |= {Kind.DISK_FULL: is_full, Kind.READ_ONLY: is_locked}
        if clock.available:
            strikes[Kind.CLOCK] = jumps
        yield World(f"{server.url}/retrieve", disk.folder / "run", (), strikes, clock.command)


@contextlib.contextmanager
def nodes(out: Path) -> Iterator[World]:
    """A cluster of two machines with a rank and an engine each; the second is lost."""
    if not are_possible():
        yield World("", out, (), {})
        return
    shutil.copy(CORPUS, out / "corpus.jsonl")
    with two_machines(out) as (first, second):
        # The second machine takes the cable along; the head's address is to stay.
        first.run("ip", "address", "add", f"{first.address}/32", "dev", "lo")
        multinode.start_retriever(first, out)
        multinode.start_retriever(second, out)
        multinode.start_cluster(first, second)

        def loses_power(fault: Fault, _: Run) -> bool:
            second.switch_off()
            time.sleep(fault.seconds)
            second.switch_on()
            plug(first, second)
            multinode.start_retriever(second, out)
            multinode.start_worker(first, second)
            return True

        def is_cut_off(fault: Fault, _: Run) -> bool:
            cut(second)
            time.sleep(fault.seconds)
            mend(second)
            return True

        options = ("trainer.nnodes=2", "actor_rollout_ref.rollout.num_replicas=2")
        strikes: dict[Kind, Strike] = {Kind.NODE_OFF: loses_power, Kind.NODE_CUT: is_cut_off}
        yield World(multinode.RETRIEVER, out / "disturbed", options, strikes, on(first))


def on(head: Machine) -> Callable[[list[str]], list[str]]:
    """What runs a command on a machine that is head of a cluster."""
    env = {**multinode.ENV, "RAY_ADDRESS": f"{head.address}:{multinode.RAY_PORT}"}
    settings = [f"{name}={value}" for name, value in env.items()]
    return lambda words: head.command("env", *settings, *words)


LEGS = {
    "retriever": (retriever, AT_THE_RETRIEVER),
    "machine": (machine, ON_THE_MACHINE),
    "nodes": (nodes, OF_A_NODE),
}
"""Faults of machine and nodes leave every figure as it was; those of the retriever leave the
rounding behind that comes of other requests sharing a batch."""
