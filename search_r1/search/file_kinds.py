"""Recognises files that are no jsonl by their beginning, and names what converts them."""

import shlex
import sys
from pathlib import Path

KINDS = (
    (b"\x1f\x8b", "a gzip file", "gunzip -k {file}"),
    (b"\x28\xb5\x2f\xfd", "a zstd file", "zstd -d {file}"),
    (b"BZh", "a bzip2 file", "bunzip2 -k {file}"),
    (b"\xfd7zXZ", "an xz file", "unxz -k {file}"),
    (b"PK\x03\x04", "a zip archive", "{python} -m zipfile -e {file} ."),
    (b"PAR1", "a parquet file", "read_parquet({name})"),
    (b"ARROW1", "an Arrow file", "read_feather({name})"),
    (b"\xff\xfe", "UTF-16 text", "iconv -f utf-16 -t utf-8 {file} > {out}"),
    (b"\xfe\xff", "UTF-16 text", "iconv -f utf-16 -t utf-8 {file} > {out}"),
    (b"SQLite format 3", "an SQLite database", ""),
    (b"\x93NUMPY", "a numpy array", ""),
    (b"\x89HDF", "an HDF5 file", ""),
    (b"\x80\x04", "a pickle", ""),
    (b"%PDF", "a PDF document", ""),
    (b"version https://git-lfs", "a pointer of git-lfs", "git lfs pull"),
)
"""First bytes, what the file is, and the command or the call of pandas that makes jsonl of it."""
FAISS_NAMES = (b"Ix", b"Iw", b"Im", b"IB", b"IH", b"IR", b"IN", b"Il")
"""First bytes of FAISS's index files, which are followed by two more letters of a name."""
HEAD_BYTES = 4096


def other_kind(head: bytes) -> tuple[str, str] | None:
    """Return what a file with this beginning is, and how to convert it; None if it may be jsonl."""
    for magic, kind, command in KINDS:
        if head.startswith(magic):
            return kind, command
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if start[:9].lower().startswith((b"<!doctype", b"<html")):
        return "an HTML page, perhaps of a login", ""
    if head[:2] in FAISS_NAMES and len(head) > 4 and b"\0" in head[4:64]:
        return "a FAISS index", ""
    if start.startswith(b"["):
        return "one JSON array", "read_json({name})"
    first_line = start.partition(b"\n")[0]
    if not start.startswith(b"{") and b"\t" in first_line:
        return "tab-separated text", "read_csv({name}, sep='\\t')"
    return None


def describe_other(path: Path, head: bytes) -> str | None:
    """Return what `path` is and the command that converts it, for an error; None for jsonl."""
    found = other_kind(head)
    if found is None:
        return None
    kind, command = found
    if not command:
        return f"got {kind}, expected jsonl; fix: give the file with the passages"
    return f"got {kind}, expected jsonl; fix: {conversion(path, command)}"


def conversion(path: Path, command: str) -> str:
    """Return the shell command that converts `path`."""
    out = path.with_name(f"{path.stem}.jsonl")
    if command.startswith("read_"):
        call = command.format(name=ascii(str(path)))
        to_json = f"to_json({str(out)!a}, orient='records', lines=True, force_ascii=False)"
        return shlex.join([sys.executable, "-c", f"import pandas as p; p.{call}.{to_json}"])
    quoted = {"file": path, "out": out, "python": sys.executable}
    return command.format(**{name: shlex.quote(str(value)) for name, value in quoted.items()})
