"""The folder of one evaluation: its manifest, and samples that are appended as they finish.

manifest.json   what was evaluated and how; a restart with a different manifest is refused
samples.jsonl   one finished dialogue per line, in the order in which they ended
metrics.json    all measures with their intervals, once all samples are finished
report.md       the same in readable form
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from search_r1.evaluation.samples import FAILED, Sample
from verl.errors import ConfigError, DataError, SaveError, explain
from verl.files import LineWriter, atomic_write
from verl.json_files import read_object

MANIFEST = "manifest.json"
MAX_MANIFEST_CHARS = 1 << 24
SAMPLES = "samples.jsonl"
METRICS = "metrics.json"
REPORT = "report.md"
LONE_SURROGATES = "backslashreplace"
"""Error handler that writes lone surrogates as JSON escapes."""

REQUIRED: Sequence[tuple[str, str, Any]] = (
    ("model", "name", str), ("data", "files", dict), ("data", "num_rows", int),
    ("retriever", "retriever", str), ("template", "name", str), ("decoding", "n", int),
    ("decoding", "temperature", int | float), ("decoding", "max_turns", int),
    ("decoding", "topk", int),
)  # fmt: skip
"""Manifest entries (section, key, type) that reports and tables need."""

Manifest = Mapping[str, Any]


class Store:
    """The open folder of a running evaluation; a context manager."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        """Start or resume an evaluation. Raises ConfigError if the folder has another one."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        _claim(folder, manifest)
        kept = [s for s in _read_samples(folder / SAMPLES) if s.status != FAILED]
        self.finished = {sample.key for sample in kept}
        """Keys of the stored samples, without failed ones, which are run again."""
        with (
            atomic_write(folder / SAMPLES) as part,
            part.open("w", encoding="utf-8", errors=LONE_SURROGATES) as file,
        ):
            file.writelines(f"{sample.to_json()}\n" for sample in kept)
        self._file = LineWriter(folder / SAMPLES)

    def append(self, sample: Sample) -> None:
        """Write one sample durably, so that it survives a kill. Raises SaveError."""
        try:
            self._file.append(sample.to_json())
        except OSError as error:
            kept = f"{len(self.finished)} samples are kept: run the same command to resume"
            raise SaveError(f"a sample could not be written ({error}); {kept}") from error
        self.finished.add(sample.key)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _claim(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a new evaluation, or check that the existing one is equal."""
    file = folder / MANIFEST
    new = json.loads(json.dumps(manifest))  # with tuples as lists, like the stored manifest
    if file.is_file():
        changes = differences(_read_manifest(file), new)
        if changes:
            raise ConfigError(
                explain(f"evaluation in {folder}", f"another evaluation: {'; '.join(changes[:5])}",
                        "the evaluation that was started there",
                        "give another --out, or resume with the same options")
            )  # fmt: skip
        return
    if (folder / SAMPLES).exists():
        fix = "give another --out"
        raise ConfigError(explain(f"{folder}", f"{SAMPLES} without {MANIFEST}", "both", fix))
    with atomic_write(file) as part:
        part.write_text(json.dumps(new, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def differences(old: Any, new: Any, name: str = "") -> list[str]:
    """List the differences between two JSON values, as `name: old, now new`."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = sorted(old.keys() | new.keys())
        parts = [differences(old.get(k), new.get(k), f"{name}.{k}".lstrip(".")) for k in keys]
        return [line for part in parts for line in part]
    return [] if old == new else [f"{name}: {old}, now {new}"]


def _read_manifest(file: Path, required: Sequence[tuple[str, str, Any]] = ()) -> Manifest:
    """Read and check a manifest. Raises DataError if it is invalid or lacks a required entry."""
    try:
        manifest: Manifest = read_object(file, MAX_MANIFEST_CHARS)
        int(manifest["data"]["num_rows"] * manifest["decoding"]["n"])
        for section, name, kind in required:
            value = manifest[section][name]
            if not isinstance(value, kind) or (name in ("num_rows", "n") and value < 1):
                raise TypeError(f"{section}.{name}={value!r}")
    except (ArithmeticError, OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        fix = "restore the file, or evaluate again into another folder"
        raise DataError(explain(str(file), repr(error), "a manifest", fix)) from error
    return manifest


def _read_samples(file: Path) -> list[Sample]:
    """Read the samples of a file; an incomplete last line, left by a kill, is ignored."""
    *lines, _ = file.read_bytes().split(b"\n") if file.is_file() else [b""]
    samples = []
    for number, line in enumerate(lines):
        try:
            samples.append(Sample.from_json(line.decode()))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            fix = "restore the file, or evaluate again into another folder"
            where = f"{file}, line {number + 1}"
            raise DataError(explain(where, repr(error), "a sample", fix)) from error
    return samples


def read_evaluation(folder: Path) -> tuple[Manifest, Sequence[Sample]]:
    """Read manifest and samples of a finished evaluation. Raises DataError for other folders."""
    if not (folder / MANIFEST).is_file():
        fix = "give the --out of an evaluation"
        raise DataError(explain(str(folder), f"no {MANIFEST}", "an evaluation", fix))
    manifest = _read_manifest(folder / MANIFEST, REQUIRED)
    samples = _read_samples(folder / SAMPLES)
    num_expected = manifest["data"]["num_rows"] * manifest["decoding"]["n"]
    num_unique = len({sample.key for sample in samples})
    if not num_unique == len(samples) == num_expected:
        got = f"{num_unique} samples{' (some twice)' * (num_unique < len(samples))}"
        fix = "run the same evaluation again: it resumes where it stopped"
        raise DataError(explain(str(folder), got, f"{num_expected}", fix))
    return manifest, samples
