"""Lists the files of a data set on the hub, and downloads them resumably with checksums.

The hub's library lists and reads files, but after a kill its own downloads begin a file again; so
the incomplete file is kept here, and read on from its end.
"""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, hf_hub_url
from huggingface_hub.file_download import http_get
from huggingface_hub.hf_api import RepoFile

from verl.errors import UserError, redact
from verl.files import sha256
from verl.hub_access import hub_address, hub_problem

FLASHRAG = "RUC-NLPIR/FlashRAG_datasets"
"""Repository of the published question sets."""
INCOMPLETE = ".incomplete"
"""Suffix of a file that is not complete and verified yet."""
PLAIN_PATH = re.compile(r"(?=.{1,1000}\Z)\w[\w.-]{0,199}(/\w[\w.-]{0,199})*", re.ASCII)
"""Paths that stay in the folder: without `..`, root, control characters, hidden files."""


class DownloadError(UserError):
    """A file that cannot be downloaded, differs from the listing, or does not fit on the disk."""


@dataclass(frozen=True)
class HubFile:
    path: str
    size: int
    sha256: str | None
    """None for small files, for which the hub has no SHA-256."""


def list_files(repo: str, prefix: str) -> list[HubFile]:
    """Return the files whose paths start with `prefix`, sorted by path. Raises DownloadError."""
    files = []
    if problem := hub_problem():
        fix = "check the network, or set HF_ENDPOINT"
        raise DownloadError(f"{repo} cannot be listed: {problem}; expected the hub: {fix}")
    with _hub_errors(f"{repo} cannot be listed", "check the network, or set HF_ENDPOINT"):
        tree = HfApi(hub_address(), token=False).list_repo_tree(
            repo, recursive=True, repo_type="dataset"
        )
        for entry in tree:
            if isinstance(entry, RepoFile) and entry.path.startswith(prefix):
                digest = entry.lfs.sha256 if entry.lfs else None
                files.append(HubFile(entry.path, int(entry.size), digest))
    if not files:
        raise DownloadError(f"{repo} has no file {prefix}*; expected the published data set")
    if unsafe := next((file.path for file in files if not PLAIN_PATH.fullmatch(file.path)), None):
        raise DownloadError(
            f"the hub lists {unsafe[:200]!a}, expected plain names such as part_aa or bm25/x; "
            "nothing is written: use another mirror (HF_ENDPOINT)"
        )
    return sorted(files, key=lambda file: file.path)


def fetch(repo: str, file: HubFile, folder: Path) -> Path:
    """Download or resume a file, verify it and return its path. Raises DownloadError."""
    path = folder / file.path
    incomplete = path.with_name(path.name + INCOMPLETE)
    if path.exists():
        if path.stat().st_size != file.size:
            raise DownloadError(
                f"{path} has {path.stat().st_size} bytes, expected the {file.size} that the hub "
                "has; it is another file: remove it, or name another folder"
            )
        return path  # it was verified before it got this name
    incomplete.parent.mkdir(parents=True, exist_ok=True)
    url = hf_hub_url(repo, file.path, repo_type="dataset", endpoint=hub_address())
    fix = "run the same command again, which resumes where this one stopped"
    incomplete.touch()
    with _hub_errors(f"{redact(url)} cannot be fetched", fix), incomplete.open("r+b") as output:
        start = output.seek(0, os.SEEK_END)
        if start < file.size:
            http_get(url, output, resume_size=start, expected_size=file.size)
    verify(incomplete, file)
    return incomplete.replace(path)


def bytes_on_disk(file: HubFile, folder: Path) -> int:
    """Return the size of a complete or incomplete file in `folder`."""
    paths = (folder / file.path, folder / (file.path + INCOMPLETE))
    return next((path.stat().st_size for path in paths if path.is_file()), 0)


def verify(path: Path, file: HubFile) -> None:
    """Raise DownloadError, and remove the file, if its size or SHA-256 differs from the hub's."""
    size = path.stat().st_size
    digest = sha256(path) if file.sha256 and size == file.size else None
    if size != file.size or digest != file.sha256:
        path.unlink()
        raise DownloadError(
            f"{file.path} has {size} bytes and SHA-256 {digest}, expected {file.size} and "
            f"{file.sha256}; it was removed: run the same command again"
        )


def disk_error(folder: Path, need: int) -> str | None:
    """Return an error message if `need` bytes do not fit on the disk of `folder`, else None."""
    existing = next(p for p in [folder.absolute(), *folder.absolute().parents] if p.exists())
    free = shutil.disk_usage(existing).free
    if need <= free:
        return None
    return (
        f"{folder} has {free / 1e9:.2f} GB free, but {need / 1e9:.2f} GB are needed; expected "
        "enough free space: free some, or give a --save_dir on another disk"
    )


@contextmanager
def _hub_errors(problem: str, fix: str) -> Iterator[None]:
    """Convert the library's errors, which are those of its HTTP client, to a DownloadError."""
    try:
        yield
    except Exception as error:  # their types depend on the library's release
        reason = redact(str(error).partition("\n")[0])[:300]
        raise DownloadError(
            f"{problem} at {redact(hub_address())!a} ({type(error).__name__}: {reason}); "
            f"expected the hub or a mirror to answer: {fix}"
        ) from error
