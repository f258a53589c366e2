"""Checkpoints: sharded, atomic, resumable with another number of ranks, exportable.

A checkpoint is the folder `global_step_N`:

    shards/            what is trained of actor and critic: weights or adapters, and their
                       optimizer state (distributed checkpoint)
    critic/            the critic's shards, ranks and adapters.json, where it had devices of its own
    adapters.json      with adapters only: their options, and the base that they need
    ranks/             schedule and random states of each rank, random states of the driver
    huggingface/       config and tokenizer of the policy
    ahead.jsonl        with max_staleness only: trajectories that are finished for later steps
    trainer_state.json the driver's state: step, data position, KL controller …
    COMPLETE           written last; a folder without it is not a checkpoint
    HEALTHY            the collapse guard trusts it; the newest of these is never deleted

It is written as `global_step_N.<random>.tmp` and renamed, so that a run killed at any moment leaves
whole checkpoints only. `python -m verl.checkpoint export STEP_DIR --out DIR` makes a Hugging Face
folder without starting ranks; an adapter is merged into its base, or alone with `--adapter`.
`folders` names, publishes and removes these folders and has the driver's part, `saver` decides when
a run saves and what it keeps, `resume` whether it may go on. `verl.training.shards` writes the
shards.
"""
