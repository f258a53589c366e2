"""A folder in a machine's shared memory that is removed when its owner process ends.

Weights that ranks write for engines are large, and memory that a killed run leaves behind is
missing in the next run. So removal does not depend on an orderly end of the process.
"""

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
"""Age below which a hidden folder may be new and not locked yet; this takes far less."""
OTHER_MACHINE_S = 24 * 3600.0
"""Age, since it was last written to, up to which another machine's folder is not removed."""
NODE_DIGITS = 12
"""Digits of a Ray node id in a folder's name: enough to tell one machine's nodes apart."""
LOCK = ".lock"
CLEANER = 'exec 3<&0; (cat <&3 > /dev/null; exec rm -rf -- "$1") &'
"""Shell script that leaves a background process, which removes a folder when its standard input
ends, that is, when the owner of the other end has ended. The background process is no child of the
owner, because Ray kills a worker's children before the worker."""


def memory_root() -> Path:
    """Return the folder for files in a machine's memory."""
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path("/tmp")


def new_path(root: Path | None = None) -> Path:
    """Return a path that is unused on every machine, in memory or in `root`; creates nothing."""
    return (root or memory_root()) / f"{PREFIX}{uuid.uuid4().hex}"


def on_node(path: Path, node_id: str) -> Path:
    """Return the node's own version of `path`: two Ray nodes may share a machine's memory."""
    return path.with_name(f"{path.name}-{node_id[:NODE_DIGITS]}")


class NodeFolder:
    """A folder that is created on this machine and removed after this process."""

    def __init__(self, path: Path) -> None:
        """Remove orphaned folders beside `path`, create and lock the folder, start its cleaner."""
        self.path = path
        remove_orphans(path.parent)
        part = path.with_name("." + path.name)
        # In a folder named by the user, the user's umask decides who may read.
        part.mkdir(mode=0o700 if path.parent == memory_root() else 0o777)
        self._lock = os.open(part / LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.write(self._lock, socket.gethostname().encode())
        os.fsync(self._lock)  # other machines must see the host's name when they see the folder
        part.rename(path)  # visible under its final name only once it is locked
        cleaner = subprocess.Popen(
            ["sh", "-c", CLEANER, "sh", str(path)],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True,
            # Without the run's mark, since the run's reaper must not kill it.
            env={"PATH": os.environ.get("PATH", os.defpath)},
        )  # fmt: skip
        cleaner.wait()  # the shell has started the background process and ended
        assert cleaner.stdin is not None
        self._cleaner_input = cleaner.stdin

    def keep_only(self, names: Collection[str]) -> None:
        """Remove all subfolders with other names."""
        for folder in self.path.iterdir():
            if folder.is_dir() and folder.name not in names:
                shutil.rmtree(folder)

    def close(self) -> None:
        """Remove the folder now."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._cleaner_input.close()
        os.close(self._lock)


def remove_orphans(root: Path) -> None:
    """Remove the folders in `root` whose owner processes have ended, except other users' folders.

    If machines share `root`, the folders of other machines are kept for a day after they were last
    written to: some file systems lock within one machine only, and a live run writes in each step.
    """
    is_shared = root != memory_root()
    for folder in (*root.glob(f"{PREFIX}*"), *root.glob(f".{PREFIX}*")):
        # OSError: the folder is gone already, is another user's, or its owner is alive. A folder
        # that a killed process removed in part may lack the lock, which is created again.
        with contextlib.suppress(OSError), (folder / LOCK).open("a+") as lock:
            lock.seek(0)
            age = time.time() - folder.stat().st_mtime
            if folder.name.startswith(".") and age < UNFINISHED_S:
                continue
            is_elsewhere = is_shared and lock.read() not in ("", socket.gethostname())
            if is_elsewhere and age < OTHER_MACHINE_S:
                continue
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
