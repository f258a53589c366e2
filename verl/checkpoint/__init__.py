"""Checkpoints: sharded, atomic, resumable with another number of ranks, exportable.

A checkpoint is the folder `global_step_N`:

    shards/            trained weights or adapters of actor and critic, and their optimizer state
                       (distributed checkpoint)
    critic/            the critic's shards, ranks and adapters.json, if it had its own devices
    adapters.json      with adapters only: their options, and the base model that they need
    ranks/             schedule and random states of each rank, random states of the driver
    huggingface/       config, tokenizer and dialogue settings of the policy
    ahead.jsonl        with max_staleness only: trajectories that are finished for later steps
    trainer_state.json the driver's state: step, data position, KL controller …
    COMPLETE           written last; a folder without it is not a checkpoint
    HEALTHY            trusted by the collapse guard; the newest of these is never deleted

It is written as `global_step_N.<random>.tmp` and renamed, so that a run killed at any moment leaves
only complete checkpoints. `python -m verl.checkpoint export STEP_DIR --out DIR` exports one as a
Hugging Face folder without starting ranks; an adapter is merged into its base model, or written
alone with `--adapter`. `names` says what these folders are called and which are complete, `folders`
publishes and removes them and reads and writes the driver's state, `saver` decides when a run saves
and which checkpoints it keeps, `resume` checks whether a run may continue from one.
`verl.training.shards` writes the shards.
"""
