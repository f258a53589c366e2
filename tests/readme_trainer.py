"""In the trainer's place (`ENTRY`) where a test is about what README tells a user to type.

It reads the options as the trainer does, the rows and the retriever that they name, and leaves a
model where the trainer would: what a GPU makes of them is beyond a test.
"""

import os
import shutil
import sys
from pathlib import Path

import httpx
import pandas as pd

from verl.config import cli


def main() -> None:
    """One search for a question of the rows, then a model that was there before."""
    config = cli.compose(sys.argv[1:])
    rows = pd.read_parquet(config.data.train_files)
    assert len(pd.read_parquet(config.data.val_files))
    assert len(rows) >= min(3, config.data.train_batch_size)
    body = {"queries": [rows["prompt"][0][0]["content"][-60:]], "topk": config.retriever.topk}
    found = httpx.post(str(config.retriever.url), json=body).json()["result"]
    assert len(found[0]) == config.retriever.topk, found
    out = Path(config.trainer.default_local_dir) / "model"
    shutil.copytree(os.environ["STAND_IN_MODEL"], out)
    sys.stdout.write(f"stand-in: trained {config.actor_rollout_ref.model.path}\n")


if __name__ == "__main__":
    main()
