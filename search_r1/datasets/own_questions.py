"""Own questions as rows of parquet files.

Files are csv (`question,answer`), jsonl or parquet (`question` and `golden_answers`, `answers` or
`answer`). Rows that name a `split` go to `<split>.parquet`; the others are divided into
`train.parquet` and `test.parquet`.
"""

from __future__ import annotations

import logging

from search_r1.datasets.building import make_rows, take_sound, write_rows
from search_r1.datasets.options import OwnOptions
from search_r1.datasets.own import OwnFiles, divide, select
from search_r1.datasets.wording import Style, writer
from verl.errors import ConfigError, explain


def build(options: OwnOptions) -> int:
    """Read all files, then write a parquet file for each split."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if not options.files:
        raise ConfigError(explain("FILE", "nothing", "csv, jsonl or parquet", "name one or more"))
    words = writer(Style.SEARCH, options.template_type)
    files = OwnFiles(options.files, options.data_source, options.split, options.answer_separator)
    names = options.data_sources.split(",") if options.data_sources else ()
    found = select(take_sound(files.read(), drop_bad=options.drop_bad_rows), names)
    questions = divide(found, options.test_share, options.seed)
    for split in sorted({question.split for question in questions}):
        some = [question for question in questions if question.split == split]
        rows = make_rows(some, words, split, keep_extra=True)
        write_rows(rows, options.local_dir / f"{split}.parquet")
    return 0
