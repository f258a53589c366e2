"""A folder in a machine's memory that lives no longer than the process that opened it.

Weights on their way from ranks to engines are large, and memory that a killed run leaves behind
is missing from the next one: so nothing here relies on a process ending in good order.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Collection
from pathlib import Path

from verl.machine import SHARED_MEMORY

PREFIX = "verl-weights-"
UNFINISHED_S = 60.0
"""For which a folder may not be locked yet; making and locking it takes far less."""
OTHERS_S = 24 * 3600.0
"""For which another machine's folder is left alone after it was last written to."""
NODE_DIGITS = 12
"""Of a node's id; enough to tell those of one machine apart."""
LOCK = ".lock"
KEEPER = 'exec 3<&0; (cat <&3 > /dev/null; exec rm -rf -- "$1") &'
"""Leaves a process that waits until its standard input ends, which is when the owner of the other
end does. It is no child of the owner: Ray kills a worker's children before the worker."""


def memory() -> Path:
    """Where a machine keeps files in its memory."""
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path("/tmp")


def new_path(root: Path | None = None) -> Path:
    """A path that is free on every machine, in its memory or in `root`; nothing is made."""
    return (root or memory()) / f"{PREFIX}{uuid.uuid4().hex}"


def on_node(path: Path, node_id: str) -> Path:
    """Where `path` lies for one node: two nodes may be one machine, and share its memory."""
    return path.with_name(f"{path.name}-{node_id[:NODE_DIGITS]}")


class NodeFolder:
    """The folder `path`, made on this machine; what earlier owners left beside it is removed."""

    def __init__(self, path: Path) -> None:
        """Make and lock the folder, and start the process that removes it after this one."""
        self.path = path
        sweep(path.parent)
        part = path.with_name("." + path.name)
        # In a folder that the user named, others may read what the user's umask lets them.
        part.mkdir(mode=0o700 if path.parent == memory() else 0o777)
        self._lock = os.open(part / LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.write(self._lock, socket.gethostname().encode())
        os.fsync(self._lock)  # other machines see the name no later than the folder
        part.rename(path)  # seen by others only when it is locked
        keeper = subprocess.Popen(
            ["sh", "-c", KEEPER, "sh", str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            env={"PATH": os.environ.get("PATH", os.defpath)},  # without the run's mark: outlives it
        )
        keeper.wait()  # it has left the process that waits for the end of this one
        assert keeper.stdin is not None
        self._keeper_input = keeper.stdin

    def keep(self, names: Collection[str]) -> None:
        """Remove the folders in it that have other names."""
        for folder in self.path.iterdir():
            if folder.is_dir() and folder.name not in names:
                shutil.rmtree(folder)

    def close(self) -> None:
        """Remove the folder now."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._keeper_input.close()
        os.close(self._lock)


def sweep(root: Path) -> None:
    """Remove the folders below `root` whose owners are gone; another user's are left alone, and in
    a folder that machines share, for a day, those of others: some file systems lock for one machine
    only, and a run that lives writes in each step."""
    is_shared = root != memory()
    for folder in (*root.glob(f"{PREFIX}*"), *root.glob(f".{PREFIX}*")):
        # Gone by now, not ours, or its owner lives: each is an OSError.
        with contextlib.suppress(OSError), (folder / LOCK).open("r+") as lock:
            age = time.time() - folder.stat().st_mtime
            if folder.name.startswith(".") and age < UNFINISHED_S:
                continue
            is_others = is_shared and lock.read() not in ("", socket.gethostname())
            if is_others and age < OTHERS_S:
                continue
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
