"""Recognises files that are no jsonl by their beginning, and names what converts them.

For readers of corpora and of questions. A command is run by the user, never by us.
"""

import json
import re
import shlex
import sys
from pathlib import Path

KINDS = (
    (b"\x1f\x8b", "a gzip file", "gzip -dc {file} > {out}"),
    (b"\x28\xb5\x2f\xfd", "a zstd file", "zstd -dc {file} > {out}"),
    (b"BZh", "a bzip2 file", "bzip2 -dc {file} > {out}"),
    (b"\xfd7zXZ", "an xz file", "xz -dc {file} > {out}"),
    (b"PK\x03\x04", "a zip archive", "{python} -m zipfile -e {file} ."),
    (b"PAR1", "a parquet file", "read_parquet({name})"),
    (b"ARROW1", "an Arrow file", "read_feather({name})"),
    (b"\xff\xff\xff\xff", "an Arrow stream", "stream"),
    (b"\xff\xfe\0\0", "UTF-32 text", "iconv -f utf-32 -t utf-8 {file} > {out}"),
    (b"\xff\xfe", "UTF-16 text", "iconv -f utf-16 -t utf-8 {file} > {out}"),
    (b"\xfe\xff", "UTF-16 text", "iconv -f utf-16 -t utf-8 {file} > {out}"),
    (b"SQLite format 3", "an SQLite database", ""),
    (b"\x93NUMPY", "a numpy array", ""),
    (b"\x89HDF", "an HDF5 file", ""),
    (b"\x80\x04", "a pickle", ""),
    (b"%PDF", "a PDF document", ""),
    (b"version https://git-lfs", "a pointer of git-lfs", "git lfs pull"),
)
"""First bytes, what the file is, and the command, or the call of pandas, that makes jsonl of it."""
FAISS_NAMES = (b"Ix", b"Iw", b"Im", b"IB", b"IH", b"IR", b"IN", b"Il")
"""First bytes of FAISS's index files, which are followed by two more letters of a name."""
SPREADSHEETS = (".xlsx", ".xls", ".ods")
TABLE = "tab-separated text"
TO_CSV = "save it as csv in UTF-8"
PACKED = (".gz", ".zst", ".bz2", ".xz")
KEPT = (".csv", ".tsv", ".jsonl", ".json", ".txt", ".parquet")
"""Suffixes that a file keeps when it is unpacked or written in another encoding."""
ROWS_KEY = re.compile(rb'\{\s*"(data|Data|rows|examples|instances|questions)"\s*:\s*\[\s*\{')
"""The beginning of one JSON object with all rows, as that of TriviaQA."""
SQUAD = re.compile(rb'"data"\s*:\s*\[.*"(?:paragraphs|qas)"\s*:\s*\[\s*\{', re.DOTALL)
SQUAD_ROWS = (
    '[{"id": q["id"], "question": q["question"], "answers": [a["text"] for a in q["answers"]]}'
    ' for t in d["data"] for p in t["paragraphs"] for q in p["qas"]]'
)
"""The questions of a file `d` of SQuAD's own form."""
HEAD_BYTES = 4096


def other_kind(head: bytes) -> tuple[str, str] | None:
    """Return what a file with this beginning is, and how to convert it; None if it may be jsonl."""
    if head[:4] == b"PK\x03\x04" and (b"xl/" in head or b"[Content_Types].xml" in head):
        return "a spreadsheet", TO_CSV
    for magic, kind, command in KINDS:
        if head.startswith(magic):
            return kind, command
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if start[:9].lower().startswith((b"<!doctype", b"<html")):
        return "an HTML page, perhaps of a login", ""
    if head[:2] in FAISS_NAMES and len(head) > 4 and b"\0" in head[4:64]:
        return "a FAISS index", ""
    for at, encoding in ((1, "utf-16le"), (0, "utf-16be")):
        if head[at:8:2] == bytes(4) and 0 not in head[1 - at : 8 : 2]:
            return "UTF-16 text without a mark", f"iconv -f {encoding} -t utf-8 {{file}} > {{out}}"
    if re.match(rb"\[\s*\{", start):
        return "one JSON array", "json(d)"
    if start.startswith(b"{") and SQUAD.search(start):
        return "one JSON object in the form of SQuAD", f"json({SQUAD_ROWS})"
    if key := ROWS_KEY.match(start):
        return "one JSON object with all rows", f'json(d["{key[1].decode()}"])'
    if re.match(rb'\{\s*\n\s*"', start):
        return "a JSON object over several lines", "json([d])"
    first_line = start.partition(b"\n")[0]
    if not start.startswith((b"{", b"[")) and b"\t" in first_line:
        return TABLE, 'read_csv({name}, sep="\\t")'
    return None


def describe_other(path: Path, head: bytes, content: str, form: str = "jsonl") -> str | None:
    """Return what `path` is and the command that converts it, for an error; None for jsonl.

    `content`: what the file should hold, such as passages. `form`: what is expected; in other
    forms than jsonl, tabs are allowed.
    """
    found = other_kind(head)
    if path.suffix.lower() in SPREADSHEETS:
        found = "a spreadsheet", TO_CSV
    if re.search(r"\.tar\.\w+\Z|\.t[gx]z\Z", path.name.lower()):
        found = "an archive", "tar -xf {file}"
    if found is None or (found[0] == TABLE and form != "jsonl"):
        return None
    kind, command = found
    fix = conversion(path, command) if command else f"give the file with the {content}"
    return f"got {kind}, expected {form}; fix: {fix}"


def conversion(path: Path, command: str) -> str:
    """Return the shell command that converts `path`."""
    if command.startswith("read_"):
        call = command.format(name=_quoted(path))
        out = _out(path, ".jsonl")
        to_json = f'to_json({_quoted(out)}, orient="records", lines=True, force_ascii=False)'
        return shlex.join([sys.executable, "-c", f"import pandas as p; p.{call}.{to_json}"])
    if command == "stream":
        code = (
            "import pyarrow as p; import pyarrow.parquet as q; "
            f"q.write_table(p.ipc.open_stream({_quoted(path)}).read_all(), "
            f"{_quoted(_out(path, '.parquet'))})"
        )
        return shlex.join([sys.executable, "-c", code])
    if command.startswith("json("):
        out = _out(path, ".jsonl")
        code = (
            f'import json; d = json.load(open({_quoted(path)}, encoding="utf-8-sig")); '
            f'open({_quoted(out)}, "w").writelines(json.dumps(r) + "\\n" for r in {command[5:-1]})'
        )
        return shlex.join([sys.executable, "-c", code])
    quoted = {"file": path, "out": _out(path), "python": sys.executable}
    return command.format(**{name: shlex.quote(str(value)) for name, value in quoted.items()})


def _quoted(path: Path) -> str:
    """Return a path as Python code that can stand within single quotes of a shell."""
    return json.dumps(str(path), ensure_ascii=False)


def _out(path: Path, suffix: str = "") -> Path:
    """Return the path of the converted file, which is another one than `path`."""
    whole = path.with_suffix("") if path.suffix.lower() in PACKED else path
    if not suffix:
        suffix = whole.suffix if whole.suffix.lower() in KEPT else ".jsonl"
    out = whole.with_name(f"{whole.stem}{suffix}")
    return out if out != path else path.with_name(f"{whole.stem}.converted{suffix}")
