"""Question files that are data sets of the hub, by name: `OWNER/NAME:SPLIT`.

A split is loaded with `datasets` and kept as a parquet file below HF_HOME, in a folder with the
commit's name; so what a run has read can be read again without a network, and is never another
commit's. `OWNER/NAME@REVISION:SPLIT` names a commit, branch or tag.
"""

import functools
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import HfApi, constants

from verl.errors import DataError, explain, first_line, redact
from verl.files import atomic_write
from verl.hub_access import hub_address, hub_problem

logger = logging.getLogger(__name__)

NAME = re.compile(
    r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>\w[\w.-]*))?(:(?P<split>\w[\w.-]*))?", re.ASCII
)
FOLDER = "question_files"
"""Folder below HF_HOME with a folder for each commit."""


@functools.cache
def local_file(name: str) -> str:
    """Return the parquet file of a data set's split, which is loaded if it is not there yet.

    Without a hub, the newest of the files that were loaded before. Raises DataError.
    """
    match = NAME.fullmatch(name)
    assert match, f"{name} is no name of a data set"
    repo, revision, split = match["repo"], match["revision"], match["split"]
    if problem := hub_problem():
        return _kept(name, repo, revision, split, problem)
    if constants.HF_HUB_OFFLINE:
        return _kept(name, repo, revision, split, "HF_HUB_OFFLINE is set")
    try:
        commit = HfApi(hub_address()).dataset_info(repo, revision=revision).sha
    except Exception as error:
        got = f"no such file, and of the hub: {redact(first_line(error))[:300]}"
        fix = "correct the path or the name (a private set: hf auth login)"
        raise DataError(explain(name, got, "a file, or a data set of the hub", fix)) from error
    path = _folder() / str(commit) / _file_name(repo, split or "")
    if not (split and path.is_file()):
        path = _loaded(name, repo, str(commit), split)
    logger.info("%s: commit %s of the hub, in %s", name, commit, path)
    return str(path)


def _folder() -> Path:
    return Path(os.environ.get("HF_HOME") or constants.HF_HOME) / FOLDER


def _file_name(repo: str, split: str) -> str:
    """Return the file's name, from which the ids of its rows begin."""
    return f"{repo.replace('/', '--')}--{split}.parquet"


def _loaded(name: str, repo: str, commit: str, split: str | None) -> Path:
    """Load a split, which may be left out if there is one only; return its parquet file."""
    import datasets  # noqa: PLC0415 - seconds, for this option

    fix = "check the name and the network, or give a file"
    try:
        splits = datasets.get_dataset_split_names(repo, revision=commit)
        if (split or splits[0]) not in splits or (split is None and len(splits) > 1):
            raise _no_split(name, split, splits)
        table = datasets.load_dataset(repo, split=split or splits[0], revision=commit)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = f"{type(error).__name__}: {redact(first_line(error))[:300]}"
        raise DataError(explain(name, reason, "a data set with rows", fix)) from error
    path = _folder() / commit / _file_name(repo, split or splits[0])
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as part:
        table.to_parquet(part)
    return path


def _no_split(name: str, split: str | None, splits: Sequence[str]) -> DataError:
    got = f"no split {split}" if split else "no split"
    repo = name.partition(":")[0]
    return DataError(explain(name, got, f"one of {', '.join(splits)}", f"{repo}:{splits[0]}"))


def _kept(name: str, repo: str, revision: str | None, split: str | None, problem: str) -> str:
    """Return the newest file of an earlier load. Raises DataError if there is none."""
    files = _folder().glob(f"{revision or '*'}/{_file_name(repo, split or '*')}")
    newest = max(files, key=lambda file: file.stat().st_mtime, default=None)
    if newest is None:
        got = f"no such file, and {problem}"
        fix = f"correct the path, or, with a network: python -m verl.data validate {name}"
        raise DataError(explain(name, got, "a file, or a data set of the hub", fix))
    logger.warning("%s: %s; using what was loaded before, %s", name, problem, newest)
    return str(newest)
