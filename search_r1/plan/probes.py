"""What a run measured: its dialogues, the seconds of its phases, and engine rates fitted to it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from scipy.optimize import minimize

from search_r1.plan.command import RateOptions
from search_r1.plan.simulation import EngineRates, Setup, StepCosts, simulate
from search_r1.plan.workload import Batch, Dialogue, LogNormal, Turn, with_waits
from verl.config import Config
from verl.data.rows import BadRow, read_jsonl
from verl.data.trajectories import read_rows
from verl.errors import DataError, explain

TRAINING = ("old_log_prob", "values", "update_critic", "update_actor")
"""Phases of the ranks' passes."""
PUBLISHING = ("gather", "write")
"""Parts of `update_weights` before the engines read."""
MOST_STEPS = 8
"""Steps whose rollouts are simulated again to fit the engine's rates."""
TRUST = 0.02
"""How far a fitted rate goes from the one before: doubling it weighs as an error of 1.4 % does."""


@dataclass(frozen=True)
class Observation:
    """A batch that engines of known number and slots rolled out, and the seconds that took."""

    batch: Batch
    num_engines: int
    slots: int
    seconds: float


def rollout_s(rates: EngineRates, observed: Observation) -> float:
    """The seconds that engines so fast would take."""
    nothing = StepCosts(lambda batch: 1e-9, lambda batch: 0.0, 0.0, 0.0)
    setup = Setup(replace(rates, slots=observed.slots), observed.num_engines, nothing)
    return simulate(setup, [observed.batch], steps=1).rollout_s


def fit_engine(observations: Sequence[Observation], start: EngineRates) -> EngineRates:
    """Rates under which simulated rollouts take as long as the observed ones.

    Least squares of the logarithms of seconds. What the observations do not tell apart stays near
    `start`.
    """

    def at(logs: np.ndarray) -> EngineRates:
        step_s, sequence_s, prefill = np.exp(logs).tolist()
        return replace(start, step_s=step_s, sequence_s=sequence_s, prefill_tokens_s=prefill)

    def loss(logs: np.ndarray) -> float:
        errors = [math.log(rollout_s(at(logs), one) / one.seconds) for one in observations]
        return fmean(error**2 for error in errors) + float(np.sum((TRUST * (logs - origin)) ** 2))

    values = (start.step_s, start.sequence_s, start.prefill_tokens_s)
    origin = np.log(np.maximum(values, 1e-9))
    found = minimize(loss, origin, method="Nelder-Mead",
                     options={"xatol": 0.01, "fatol": 1e-6, "maxfev": 400})  # fmt: skip
    return at(found.x)


@dataclass(frozen=True)
class Run:
    """What the folder of a run tells."""

    metrics: tuple[Mapping[str, float], ...]
    """Of each step, but the first, in which everything starts, where there are others."""
    steps: Mapping[int, tuple[Dialogue, ...]]
    """Dialogues by step, where the run kept them."""

    @property
    def dialogues(self) -> tuple[Dialogue, ...]:
        """Of all steps."""
        return tuple(itertools.chain.from_iterable(self.steps.values()))

    def rates(self, given: RateOptions, ranks: int) -> RateOptions:
        """`given`, completed by what was measured where nothing was given."""
        tokens = self._mean("perf/total_num_tokens")
        training = sum(self._mean(f"timing_s/{phase}") for phase in TRAINING)
        weights = self._mean("timing_s/update_weights")
        publish = sum(self._mean(f"timing_s/update_weights/{part}") for part in PUBLISHING)
        switch = self._mean("timing_s/update_weights/wake_up")
        rest = self._mean("timing_s/step") - self._mean("timing_s/gen") - training - weights
        adopt = weights - publish - switch
        return replace(
            given,
            train_tokens_s=given.train_tokens_s
            or (tokens / training / ranks if training else None),
            publish_s=publish if given.publish_s is None else given.publish_s,
            adopt_s=adopt if given.adopt_s is None else given.adopt_s,
            switch_s=switch,
            driver_tokens_s=tokens / max(rest, 1e-3),
        )

    def observations(self, config: Config, search_s: LogNormal, on_gpu: bool) -> list[Observation]:
        """The rollouts of its latest steps."""
        engines, slots = config.num_engines(on_gpu), config.max_num_seqs(on_gpu)
        random, group = np.random.default_rng(0), config.actor_rollout_ref.rollout.n_agent
        found = []
        for row in self.metrics[-MOST_STEPS:]:
            dialogues = self.steps.get(int(row["step"]))
            if dialogues:
                batch = Batch(tuple(with_waits(dialogues, search_s, random)), group)
                found.append(Observation(batch, engines, slots, row["timing_s/gen"]))
        return found

    def _mean(self, name: str) -> float:
        """0 for a phase that the run did not have."""
        return fmean(row[name] if row.get(name) else 0.0 for row in self.metrics)


def read_run(folder: Path, config: Config) -> Run:
    """The metrics and dialogues of a run. Raises DataError."""
    path = folder / "metrics.jsonl"
    rows = [row for _, row in read_jsonl(str(path))] if path.is_file() else []
    metrics = [row for row in rows if not isinstance(row, BadRow) and "timing_s/gen" in row]
    if not metrics:
        expected = "metrics.jsonl with timing_s/gen: a run that trained for a step or more"
        fix = "name the folder trainer.default_local_dir of such a run"
        raise DataError(explain("--run", folder, expected, fix))
    steps: dict[int, list[Dialogue]] = {}
    kept = config.trainer.rollout_data_dir
    for place, row in read_rows(kept) if kept is not None else ():
        step, dialogue = _dialogue(place, row)
        steps.setdefault(step, []).append(dialogue)
    return Run(tuple(metrics[1:] or metrics), {n: tuple(found) for n, found in steps.items()})


def _dialogue(place: str, row: Mapping[str, Any]) -> tuple[int, Dialogue]:
    """The step of a dumped trajectory, and its token counts. Raises DataError."""
    prompt, turns = 0, list[Turn]()
    try:
        for segment in row["segments"]:
            count = len(segment["ids"])
            if segment["origin"] == "policy":
                turns.append(Turn(max(1, count)))
            elif segment["origin"] == "observation":
                turns[-1] = replace(turns[-1], observed=turns[-1].observed + count)
            else:
                prompt += count
        return int(row["step"]), Dialogue(prompt, tuple(turns) or (Turn(1),))
    except (LookupError, TypeError, ValueError) as error:
        expected = "a trajectory as a run writes it"
        raise DataError(explain(place, repr(error), expected, "delete the file")) from error
