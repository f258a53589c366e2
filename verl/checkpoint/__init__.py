"""Checkpoints: sharded, atomic, resumable with another number of ranks, exportable.

A checkpoint is the folder `global_step_N`:

    shards/            what is trained of actor and critic: weights or adapters, and their
                       optimizer state (distributed checkpoint)
    adapters.json      with adapters only: their options, and the base that they need
    ranks/             schedule and random states of each rank, random states of the driver
    huggingface/       config and tokenizer of the policy
    trainer_state.json the driver's state: step, data position, KL controller …
    COMPLETE           written last; a folder without it is not a checkpoint
    HEALTHY            the collapse guard trusts it; the newest of these is never deleted

It is written as `global_step_N.<random>.tmp` and renamed, so that a run killed at any moment leaves
whole checkpoints only. `python -m verl.checkpoint export STEP_DIR --out DIR` makes a Hugging Face
folder without starting ranks; an adapter is merged into its base, or alone with `--adapter`.
`verl.checkpoint.saver` decides when a run saves and what it keeps; the ranks' shards are written by
`verl.training.shards`.
"""

from verl.checkpoint.exporting import export as export
from verl.checkpoint.folders import (
    HEALTHY as HEALTHY,
)
from verl.checkpoint.folders import (
    MARKER as MARKER,
)
from verl.checkpoint.folders import (
    STEP_NAME as STEP_NAME,
)
from verl.checkpoint.folders import (
    all_complete as all_complete,
)
from verl.checkpoint.folders import (
    begin as begin,
)
from verl.checkpoint.folders import (
    clean as clean,
)
from verl.checkpoint.folders import (
    exclusive as exclusive,
)
from verl.checkpoint.folders import (
    is_complete as is_complete,
)
from verl.checkpoint.folders import (
    latest as latest,
)
from verl.checkpoint.folders import (
    mark_healthy as mark_healthy,
)
from verl.checkpoint.folders import (
    publish as publish,
)
from verl.checkpoint.folders import (
    remove as remove,
)
from verl.checkpoint.folders import (
    resolve as resolve,
)
from verl.checkpoint.folders import (
    set_aside as set_aside,
)
from verl.checkpoint.folders import (
    step_folder as step_folder,
)
from verl.checkpoint.folders import (
    step_of as step_of,
)
from verl.checkpoint.folders import (
    writing as writing,
)
from verl.checkpoint.state import (
    RunState as RunState,
)
from verl.checkpoint.state import (
    read_state as read_state,
)
from verl.checkpoint.state import (
    write_state as write_state,
)
