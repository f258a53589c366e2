"""Checks of a run's question files."""

from collections.abc import Iterator

from verl.config import Config
from verl.data.columns import ALL_ROWS, Columns
from verl.data.rows import load_rows
from verl.errors import DataError, UserError, explain


def problems(config: Config) -> Iterator[UserError]:
    """Check that the question files are readable, valid, and have enough rows for one batch."""
    if not config.samples_rollouts:
        return
    data = config.data
    train_rows = 1 if config.trainer.val_only else data.train_batch_size
    of_training = Columns.of_training(data)
    for key, files, limit, min_rows, columns in (
        ("train", data.train_files, data.train_data_num, train_rows, of_training),
        ("val", data.val_files, data.val_data_num, 1, ALL_ROWS),
    ):
        try:
            num_rows = len(columns.matching(load_rows(files, columns=columns.names)))
        except DataError as error:
            yield DataError(f"data.{key}_files: {error}")
            continue
        usable = num_rows if limit is None else min(limit, num_rows)
        if usable < min_rows:
            expected = f"data.{key}_batch_size={min_rows} or more"
            fix = f"set data.{key}_batch_size={usable}, or give more rows"
            yield DataError(explain(f"data.{key}_files", f"{usable} rows", expected, fix))
