"""Checkpoints: sharded, atomic, resumable with another number of ranks, exportable.

A checkpoint is the folder `global_step_N`:

    shards/            what is trained of actor and critic: weights or adapters, and their
                       optimizer state (distributed checkpoint)
    adapters.json      with adapters only: their options, and the base that they need
    ranks/             schedule and random states of each rank, random states of the driver
    huggingface/       config and tokenizer of the policy
    trainer_state.json what the driver wants back: step, data position, KL controller …
    COMPLETE           written last; a folder without it is not a checkpoint
    HEALTHY            the collapse guard trusts it: whoever makes room keeps the newest of these

It is written as `global_step_N.<random>.tmp` and renamed, so that a run killed at any moment leaves
whole checkpoints only. `python -m verl.checkpoint export STEP_DIR --out DIR` makes a Hugging Face
folder without starting ranks; an adapter is merged into its base, or alone with `--adapter`.
When a run saves, and what it keeps, is in `verl.checkpoint.saver`.
"""

from verl.checkpoint.exporting import export
from verl.checkpoint.folders import (
    HEALTHY,
    MARKER,
    STEP_NAME,
    all_complete,
    begin,
    clean,
    exclusive,
    is_complete,
    latest,
    mark_healthy,
    publish,
    remove,
    resolve,
    set_aside,
    step_folder,
    step_of,
    writing,
)
from verl.checkpoint.shards import (
    ADAPTERS_FILE,
    ShardWriter,
    load_shards,
    num_bytes,
    read_adapters,
    save_shards,
)
from verl.checkpoint.state import (
    RunState,
    random_states,
    read_state,
    set_random_states,
    write_state,
)
from verl.training.adapters import check_same

__all__ = [
    "ADAPTERS_FILE",
    "HEALTHY",
    "MARKER",
    "STEP_NAME",
    "RunState",
    "ShardWriter",
    "all_complete",
    "begin",
    "check_same",
    "clean",
    "exclusive",
    "export",
    "is_complete",
    "latest",
    "load_shards",
    "mark_healthy",
    "num_bytes",
    "publish",
    "random_states",
    "read_adapters",
    "read_state",
    "remove",
    "resolve",
    "save_shards",
    "set_aside",
    "set_random_states",
    "step_folder",
    "step_of",
    "write_state",
    "writing",
]
