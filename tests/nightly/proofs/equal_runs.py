"""Show that two versions of the trainer compute the same: metrics and weights, bit for bit.

Run it in a checkout of each version, then compare the two files:

    python -m tests.nightly.proofs.equal_runs run OUT.json
    python -m tests.nightly.proofs.equal_runs compare OLD.json NEW.json

A real rank, real transformers engines and the real trainer run in this process, for four steps from
the same random weights. In an older checkout, copy this file beside its `local_run.py` first.
"""

import argparse
import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.compare import is_computed
from tests.verl.trainer.local_run import run_config, train
from tests.verl.training.ranks import save_tiny

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
NUM_STEPS, DELAYS = 4, 3


def run(name: str, model: str, folder: Path) -> dict[str, Any]:
    """Train one case; returns the metrics that depend on no clock, and a hash of the weights."""
    rows = train(run_config(model, folder, *CASES[name]), NUM_STEPS, delays=DELAYS)
    weights = hashlib.sha256()
    for file in sorted((folder / "model").glob("*.safetensors")):
        for key, tensor in sorted(load_file(file).items()):
            weights.update(key.encode() + tensor.float().numpy().tobytes())
    metrics = [{key: value for key, value in row.items() if is_computed(key)} for row in rows]
    return {"metrics": metrics, "weights": weights.hexdigest()}


def run_all(out: Path) -> None:
    """Run every case and write the results as JSON."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        model = save_tiny(Path(folder) / "start")
        results = {name: run(name, model, Path(folder) / name) for name in CASES}
    out.write_text(json.dumps(results, sort_keys=True) + "\n")


def differences(old: Any, new: Any) -> list[str]:
    """Return the metrics of a case that one run lacks or that differ, and `weights` if they do."""
    found = [] if old["weights"] == new["weights"] else ["weights"]
    for before, after in zip(old["metrics"], new["metrics"], strict=True):
        names = sorted(before.keys() | after.keys())
        found += [name for name in names if repr(before.get(name)) != repr(after.get(name))]
    return found


def main() -> int:
    """Run or compare; returns 1 if anything differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("action", choices=("run", "compare"))
    parser.add_argument("files", nargs="+", type=Path)
    args = parser.parse_args()
    if args.action == "run":
        run_all(args.files[0])
        return 0
    old, new = (json.loads(file.read_text()) for file in args.files)
    found = {name: differences(old[name], new[name]) for name in CASES}
    for name, names in found.items():
        sys.stdout.write(f"{name}: {', '.join(names) or 'equal'}\n")
    return int(any(found.values()))


if __name__ == "__main__":
    sys.exit(main())
