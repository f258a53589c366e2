"""Tries a FAISS file in a child process, because a damaged one can end the process that reads it.

The child (`faiss_trial.py`) reads it, checks its rows and searches it. A Flat index needs no trial:
its layout is checked before FAISS reads it. Also: FAISS's messages without their C++ signatures.
"""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from dataclasses import asdict
from pathlib import Path

from search_r1.retrieval.errors import ROOT, IndexMismatch, SearchError, SetupError
from search_r1.retrieval.settings import FaissConfig

TRIAL = "search_r1.retrieval.engines.faiss_trial"
ERRORS: dict[int, type[SearchError]] = {10: SetupError, 11: IndexMismatch}
"""Exit status of the child for an error, whose message it has written."""
START_S, BYTES_PER_S = 60, 20e6
"""Seconds for a start, and bytes that a slow disk reads in a second."""
SIGNATURE = re.compile(r"^Error in .* at \S+:\d+: (?:Error: )?", re.DOTALL)
"""The beginning of FAISS's messages: function with its C++ types, file and line."""


def reason_of(error: Exception) -> str:
    """Return FAISS's message in one short line."""
    text = SIGNATURE.sub("", str(error)) or type(error).__name__
    return textwrap.shorten(text, 200)


def try_in_child(path: Path, config: FaissConfig, *, whole: bool, trial: str = TRIAL) -> None:
    """Raise SetupError or IndexMismatch unless a child process can read and search the index.

    It maps the file, so that the second reading comes from memory, and takes about a second more
    than that. `whole`: check all vectors, not a sample; `trial`: the module that the child runs.
    """
    request = json.dumps({"path": str(path), "config": asdict(config), "whole": whole})
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    limit = START_S + path.stat().st_size / BYTES_PER_S
    try:
        child = subprocess.run(
            [sys.executable, "-P", "-m", trial, request],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=None if whole else limit,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise _unreadable(path, f"FAISS was not done after {limit:.0f} s") from error
    if error_class := ERRORS.get(child.returncode):
        raise error_class(child.stdout.decode(errors="replace"))
    if child.returncode < 0:
        name = signal.Signals(-child.returncode).name
        raise _unreadable(path, f"FAISS ended with {name}")
    if child.returncode:
        last = (child.stderr.decode(errors="replace").strip() or "no output").splitlines()[-1]
        raise _unreadable(path, f"status {child.returncode}: {textwrap.shorten(last, 200)}")


def _unreadable(path: Path, reason: str) -> SetupError:
    return SetupError(
        f"{path} cannot be read: {reason} in a trial; expected a complete index file, and memory "
        "for it: build or download it again"
    )
