"""Raw records of a set's split: from the hub through `datasets`, or from files laid out as there.

`HF_ENDPOINT` names a mirror, and `HF_HUB_OFFLINE=1` takes what an earlier run left in the cache;
both are read by the hub's own library.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import datasets
import huggingface_hub.errors

from search_r1.datasets.catalogue import HUB, QuestionSet
from search_r1.datasets.question import ANSWER_COLUMNS, Place, Question, read_question
from verl.data.rows import BadRow, Record, read_records
from verl.errors import DataError, explain

logger = logging.getLogger(__name__)

SUFFIXES = (".jsonl", ".parquet")
COLUMNS = ("id", "question", *ANSWER_COLUMNS)
"""What is read of the hub's tables: their `metadata` holds whole contexts."""


def read_split(
    one: QuestionSet, split: str, local: Path | None = None
) -> Iterator[Question | BadRow]:
    """The questions of a published split in its order, or what is wrong with each.

    `local` is a folder as the hub has it (`<set>/<split>.jsonl`, or parquet). Raises DataError
    where the split cannot be had.
    """
    file, records = _from_folder(one, split, local) if local else _from_hub(one, split)
    for number, record in records:
        yield read_question(record, Place(file, number, one.name, split))


def _from_folder(one: QuestionSet, split: str, local: Path) -> tuple[str, Iterator[Record]]:
    """The file of a split below `local`, in a folder of the set's name or beside the others."""
    places = [f / f"{split}{s}" for f in (local / one.name, local) for s in SUFFIXES]
    if local.name != one.name:
        places = places[: len(SUFFIXES)]
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        expected = f"{places[0]} (or .parquet), as in {HUB}"
        fix = f"copy the file there, or: hf download --repo-type dataset {HUB} --local-dir {local}"
        raise DataError(explain("--local_dataset_path", "no such file", expected, fix))
    return str(file), read_records(str(file), ("question",))


def _from_hub(one: QuestionSet, split: str) -> tuple[str, Iterator[Record]]:
    """The table of a split, downloaded or from the cache."""
    place = f"{HUB}/{one.name}/{split}"
    logger.info("loading %s", place)
    try:
        table = datasets.load_dataset(HUB, one.name, split=split)
    except (
        OSError,
        ValueError,
        datasets.exceptions.DatasetsError,
        huggingface_hub.errors.HfHubHTTPError,
    ) as error:
        fix = (
            "check the network, name a mirror (HF_ENDPOINT=https://...), or give files: "
            "--local_dataset_path FOLDER (docs/data.md)"
        )
        reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        raise DataError(explain(place, reason, "the published split", fix)) from error
    known = table.select_columns([name for name in COLUMNS if name in table.column_names])
    return place, enumerate(known)
