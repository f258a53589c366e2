"""Demonstrations from a run's own trajectories: `python -m verl.trainer.rejection_sampling`.

Reads the trajectories in `trainer.rollout_data_dir`, accepts the answered ones with a good score,
and writes them for `verl.trainer.sft` with their exact token ids, so that nothing is tokenised
again and the masks are those of the run.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import tyro

from verl.bounds import MAX_SEED
from verl.config.known import limit_problems, raise_problems
from verl.ext.sft.options import bounded
from verl.logs import exit_status


@dataclass(frozen=True)
class Criteria:
    """Which trajectories become demonstrations."""

    min_score: float = bounded(1.0)
    """Minimum value of the measure."""
    measure: str = "score"
    """Measure that decides: score, or a component such as em if the score rewards other things."""
    per_prompt: int = bounded(1, ge=1)
    """Maximum trajectories to keep per question, over all steps."""
    max_tokens: int | None = bounded(None, ge=1)
    """Maximum tokens of a trajectory, including prompt and observations."""
    prefer: Literal["short", "few_searches", "random"] = "short"
    """Preference among a question's trajectories: fewest policy tokens, fewest calls, or random."""
    seed: int = bounded(0, ge=0, le=MAX_SEED)
    """Seed of random choices, also among equally preferred trajectories."""


@dataclass(frozen=True, kw_only=True)
class Options(Criteria):
    """Command-line options."""

    rollouts: str
    """Folder of recorded trajectories: trainer.rollout_data_dir of the run."""
    out: str
    """Demonstrations to write (jsonl file)."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line: print the report as JSON and return the exit status."""
    prog, description = "python -m verl.trainer.rejection_sampling", (__doc__ or "").splitlines()[0]
    options = tyro.cli(Options, args=arguments, prog=prog, description=description)

    def work() -> None:
        raise_problems(limit_problems(options))
        from verl.ext.sft.candidates import run  # noqa: PLC0415 - torch, for which --help need not wait

        sys.stdout.write(json.dumps(vars(run(options))) + "\n")

    return exit_status(work)


if __name__ == "__main__":
    sys.exit(main())
