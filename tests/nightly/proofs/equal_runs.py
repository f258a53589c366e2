"""Show that two versions of the trainer compute the same: metrics and weights, bit for bit.

Run it in a checkout of each version, then compare the two folders:

    python -m tests.nightly.proofs.equal_runs run OUT
    python -m tests.nightly.proofs.equal_runs compare OLD NEW

A real rank, real transformers engines and the real trainer run in this process, for four steps from
the same random weights. In an older checkout, copy this file beside its `local_run.py` first. The
offline runs train on recorded steps: with `--record OLD/record` on those of the other version, so
that they compare the updates alone where engines sample differently.
"""

import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

from tests.compare import differences, same_weights
from tests.verl.trainer.local_run import run_config, train
from tests.verl.training.ranks import save_tiny
from verl.data.trajectories import prepare_folder

GRPO = "algorithm.adv_estimator=grpo"
CASES = {
    "grpo": [GRPO, "actor_rollout_ref.actor.use_kl_loss=true"],
    "ppo": ["algorithm.adv_estimator=gae", "critic.optim.lr=1e-2"],
    "lora": [GRPO, "actor_rollout_ref.model.lora_rank=4"],
    "dynamic sampling": [
        GRPO, "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.max_num_gen_batches=3",
    ],
    "staleness 2": [GRPO, "actor_rollout_ref.rollout.max_staleness=2"],
}  # fmt: skip
OFFLINE = {f"offline {name}": CASES[name] for name in ("grpo", "ppo", "lora")}
NUM_STEPS, DELAYS = 4, 3


def run_all(out: Path, record: Path | None) -> None:
    """Run every case; writes `metrics.json` and `model/` to a folder of its own below `out`."""
    torch.manual_seed(0)
    model = save_tiny(out / "start")
    if record is None:
        record = out / "record"
        prepare_folder(record, SimpleNamespace(get_vocab=dict))
        kept = f"trainer.rollout_data_dir={record}"
        train(run_config(model, out / "recorded", GRPO, kept), NUM_STEPS, delays=DELAYS)
    offline = {name: [*options, f"data.rollouts={record}"] for name, options in OFFLINE.items()}
    for name, options in (CASES | offline).items():
        rows = train(run_config(model, out / name, *options), NUM_STEPS, delays=DELAYS)
        numbered = [{"step": step, **row} for step, row in enumerate(rows, 1)]
        (out / name / "metrics.json").write_text(json.dumps(numbered) + "\n")


def difference(old: Path, new: Path) -> str:
    """Return what differs between two runs of a case; empty if nothing does."""
    rows, others = (json.loads((folder / "metrics.json").read_text()) for folder in (old, new))
    found = sorted({found.name for found in differences(rows, others)})
    if not same_weights(old / "model", new / "model"):
        found.append("weights")
    return ", ".join(found)


def main() -> int:
    """Run or compare; returns 1 if anything differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("action", choices=("run", "compare"))
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--record", type=Path, help="of the other version, for the offline runs")
    args = parser.parse_args()
    if args.action == "run":
        run_all(args.folders[0], args.record)
        return 0
    old, new = args.folders
    found = {name: difference(old / name, new / name) for name in CASES | OFFLINE}
    for name, names in found.items():
        sys.stdout.write(f"{name}: {names or 'equal'}\n")
    return int(any(found.values()))


if __name__ == "__main__":
    sys.exit(main())
