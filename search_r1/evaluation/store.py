"""The folder of one evaluation: its manifest, and samples that are appended as they finish.

manifest.json   what was evaluated, on what, how; a restart with anything else is refused
samples.jsonl   one finished dialogue a line, in the order in which they ended
metrics.json    every measure with its interval, once all samples are there
report.md       the same for people
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from search_r1.evaluation.samples import FAILED, Sample
from verl.errors import ConfigError, DataError, SaveError, explain
from verl.files import LineWriter, atomic_write

MANIFEST = "manifest.json"
SAMPLES = "samples.jsonl"
METRICS = "metrics.json"
REPORT = "report.md"
LONE_SURROGATES = "backslashreplace"
"""How text that is not Unicode is written: as JSON escapes it."""

NEEDED: Sequence[tuple[str, str, Any]] = (
    ("model", "name", str), ("data", "files", dict), ("data", "num_rows", int),
    ("retriever", "retriever", str), ("template", "name", str), ("decoding", "n", int),
    ("decoding", "temperature", int | float), ("decoding", "max_turns", int),
    ("decoding", "topk", int),
)  # fmt: skip
"""What reports and tables say of a manifest."""

Manifest = Mapping[str, Any]


class Store:
    """The open folder of a running evaluation; a context manager."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        """Open or go on with the folder. Raises ConfigError where it holds another evaluation."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        _claim(folder, manifest)
        kept = [s for s in _read(folder / SAMPLES) if s.status != FAILED]
        self.finished = {sample.key for sample in kept}
        """What is there already; failed dialogues are played again."""
        with (
            atomic_write(folder / SAMPLES) as part,
            part.open("w", encoding="utf-8", errors=LONE_SURROGATES) as file,
        ):
            file.writelines(f"{sample.to_json()}\n" for sample in kept)
        self._file = LineWriter(folder / SAMPLES)

    def append(self, sample: Sample) -> None:
        """Write one sample; it survives a kill from here on. Raises SaveError."""
        try:
            self._file.append(sample.to_json())
        except OSError as error:
            kept = f"{len(self.finished)} samples are kept: the same command goes on from there"
            raise SaveError(f"a sample could not be written ({error}); {kept}") from error
        self.finished.add(sample.key)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _claim(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a new evaluation, or see that the one there says the same."""
    file = folder / MANIFEST
    wanted = json.loads(json.dumps(manifest))
    if file.is_file():
        changes = differences(_read_manifest(file), wanted)
        if changes:
            raise ConfigError(
                explain(f"evaluation in {folder}", f"another one: {'; '.join(changes[:5])}",
                        "the evaluation that was started there",
                        "give another --out, or go on with the same options")
            )  # fmt: skip
        return
    if (folder / SAMPLES).exists():
        fix = "give another --out"
        raise ConfigError(explain(f"{folder}", f"{SAMPLES} without {MANIFEST}", "both", fix))
    with atomic_write(file) as part:
        part.write_text(json.dumps(wanted, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def differences(old: Any, new: Any, name: str = "") -> list[str]:
    """Where two JSON values differ, as `name: old, now new`."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = sorted(old.keys() | new.keys())
        parts = [differences(old.get(k), new.get(k), f"{name}.{k}".lstrip(".")) for k in keys]
        return [line for part in parts for line in part]
    return [] if old == new else [f"{name}: {old}, now {new}"]


def _read_manifest(file: Path, needed: Sequence[tuple[str, str, Any]] = ()) -> Manifest:
    """The manifest there is. Raises DataError where it is not one, or lacks what is needed."""
    try:
        found: Manifest = json.loads(file.read_bytes())
        int(found["data"]["num_rows"] * found["decoding"]["n"])
        for part, name, kind in needed:
            value = found[part][name]
            if not isinstance(value, kind) or (name in ("num_rows", "n") and value < 1):
                raise TypeError(f"{part}.{name}={value!r}")
    except (ArithmeticError, OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        fix = "restore the file, or evaluate again into another folder"
        raise DataError(explain(str(file), repr(error), "a manifest", fix)) from error
    return found


def _read(file: Path) -> list[Sample]:
    """The samples of a file; a last line that a kill cut short is left out."""
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
    """Manifest and samples of a finished evaluation. Raises DataError for any other folder."""
    if not (folder / MANIFEST).is_file():
        fix = "give the --out of an evaluation"
        raise DataError(explain(str(folder), f"no {MANIFEST}", "an evaluation", fix))
    manifest = _read_manifest(folder / MANIFEST, NEEDED)
    samples = _read(folder / SAMPLES)
    wanted = manifest["data"]["num_rows"] * manifest["decoding"]["n"]
    num_different = len({sample.key for sample in samples})
    if not num_different == len(samples) == wanted:
        got = f"{num_different} samples{' (some twice)' * (num_different < len(samples))}"
        fix = "run the same evaluation again: it goes on where it stopped"
        raise DataError(explain(str(folder), got, f"{wanted}", fix))
    return manifest, samples
