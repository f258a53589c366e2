"""From the options of `search-r1 plan` to what it prints: a table or JSON, the best, its margin.

What a run measured (`--run`) gives its dialogues, the seconds of its phases, and engine rates
fitted to it.
"""

import itertools
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from scipy.optimize import minimize

from search_r1.plan.command import PlanOptions, RateOptions
from search_r1.plan.placements import (
    Costs,
    Placement,
    PlacementResult,
    changes,
    divisions,
    estimate_capacity,
    simulate_placement,
)
from search_r1.plan.simulation import EngineRates, Setup, StepCosts, simulate
from search_r1.plan.workload import Batch, Dialogue, LogNormal, Turn, Workload, add_search_times
from verl.bounds import MAX_NUMBER
from verl.config import Config, cli
from verl.data.rows import BadRow, read_jsonl
from verl.data.trajectories import read_rows
from verl.errors import ConfigError, DataError, explain
from verl.model_shape import read_shape

TRAINING = ("old_log_prob", "values", "update_critic", "update_actor")
"""Phases of the ranks' passes."""
CRITIC_OVERLAPS = ("old_log_prob", "update_actor", "wait_critic")
"""The phases with a critic on its own cards, whose other seconds are the actor's too."""
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


def simulate_rollout(rates: EngineRates, observed: Observation) -> float:
    """The seconds that engines so fast would take."""
    nothing = StepCosts(lambda batch: 1e-9, lambda batch: 0.0, 0.0, 0.0)
    setup = Setup(replace(rates, slots=observed.slots), observed.num_engines, nothing)
    return simulate(setup, [observed.batch], steps=1).rollout_s


def fit_engine(
    observations: Sequence[Observation], start: EngineRates, knows_prefill: bool = False
) -> EngineRates:
    """Rates under which simulated rollouts take as long as the observed ones.

    Least squares of the logarithms of seconds. What the observations do not tell apart stays near
    `start`, and its reading rate as it is where that is known.
    """

    def at(logs: np.ndarray) -> EngineRates:
        step_s, sequence_s, *fitted = np.exp(logs).tolist()
        prefill = fitted[0] if fitted else start.prefill_tokens_s
        return replace(start, step_s=step_s, sequence_s=sequence_s, prefill_tokens_s=prefill)

    def loss(logs: np.ndarray) -> float:
        errors = [math.log(simulate_rollout(at(logs), one) / one.seconds) for one in observations]
        return fmean(error**2 for error in errors) + float(np.sum((TRUST * (logs - origin)) ** 2))

    values = (start.step_s, start.sequence_s, start.prefill_tokens_s)
    origin = np.log(np.maximum(values[: 2 if knows_prefill else 3], 1e-9))
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
        return tuple(itertools.chain.from_iterable(self.steps.values()))

    def rates(self, given: RateOptions, config: Config) -> RateOptions:
        """`given`, completed by what was measured where nothing was given."""
        tokens = self._mean("perf/total_num_tokens")
        phases = CRITIC_OVERLAPS if config.has_own_critic else TRAINING
        training = sum(self._mean(f"timing_s/{phase}") for phase in phases)
        weights = self._mean("timing_s/update_weights")
        publish = sum(self._mean(f"timing_s/update_weights/{part}") for part in PUBLISHING)
        switch = self._mean("timing_s/update_weights/wake_up")
        rest = self._mean("timing_s/step") - self._mean("timing_s/gen") - training - weights
        return replace(
            given,
            train_tokens_s=given.train_tokens_s
            or (tokens / training / config.num_ranks if training else None),
            publish_s=publish if given.publish_s is None else given.publish_s,
            adopt_s=self._adopt_s(config) if given.adopt_s is None else given.adopt_s,
            switch_s=switch if given.switch_s is None else given.switch_s,
            driver_tokens_s=given.driver_tokens_s or tokens / max(rest, 1e-3),
        )

    def _adopt_s(self, config: Config) -> float | None:
        """None if engines load while the ranks train: nobody waits for it, so it is not timed."""
        if config.actor_rollout_ref.rollout.max_staleness and not config.streams_weights:
            return None
        return self._mean("timing_s/update_weights/load")

    def observations(self, config: Config, search_s: LogNormal, on_gpu: bool) -> list[Observation]:
        """The rollouts of its latest steps."""
        engines, slots = config.num_engines(on_gpu), config.max_num_seqs(on_gpu)
        random, group = np.random.default_rng(0), config.actor_rollout_ref.rollout.n_agent
        found = []
        for row in self.metrics[-MOST_STEPS:] if config.samples_rollouts else ():
            dialogues = self.steps.get(int(row["step"]))
            if dialogues:
                batch = Batch(tuple(add_search_times(dialogues, search_s, random)), group)
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
                observed = turns[-1].observation_tokens + count
                turns[-1] = replace(turns[-1], observation_tokens=observed)
            else:
                prompt += count
        return int(row["step"]), Dialogue(prompt, tuple(turns) or (Turn(1),))
    except (LookupError, TypeError, ValueError) as error:
        expected = "a trajectory as a run writes it"
        raise DataError(explain(place, repr(error), expected, "delete the file")) from error


EQUAL = 0.02
"""Share by which steps differ that count as equally long: then the fresher weights win."""
COLUMNS = ("cards", "engines", "stale", "budget", "slots", "step s", "rollout s", "engines idle",
           "ranks idle", "cards idle", "rank GB", "engine GB", "waits on the host")  # fmt: skip


def choose(planned: Sequence[PlacementResult]) -> PlacementResult | None:
    """The least stale of those that fit and are as fast as the fastest; None where none fits."""
    fitting = [one for one in planned if one.capacity.fits]
    if not fitting:
        return None
    limit = (1 + EQUAL) * min(one.outcome.step_s for one in fitting)
    equal = [one for one in fitting if one.outcome.step_s <= limit]
    return min(equal, key=lambda one: (one.placement.staleness, one.outcome.step_s))


def margins(best: PlacementResult | None, planned: Sequence[PlacementResult]) -> dict[str, float]:
    """By how much others that fit take longer, as a share: `next`, the fastest with other cards,
    `fresh`, the fastest without staleness, and `today`, shared cards without staleness."""
    if best is None:
        return {}
    others = [one for one in planned if one.capacity.fits]
    groups = {
        "next": [o for o in others if o.placement.rollout_cards != best.placement.rollout_cards],
        "fresh": [o for o in others if not o.placement.staleness],
        "today": [o for o in others if not o.placement.staleness and o.placement.shares_cards],
    }
    return {
        name: min(one.outcome.step_s for one in group) / best.outcome.step_s - 1
        for name, group in groups.items()
        if group
    }


def table(planned: Sequence[PlacementResult]) -> str:
    rows = [COLUMNS, ("---",) * len(COLUMNS), *map(_row, planned)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(one: PlacementResult) -> tuple[str, ...]:
    placement, capacity, outcome = one.placement, one.capacity, one.outcome
    size = f" x {placement.tensor_parallel}" if placement.tensor_parallel > 1 else ""
    return (
        placement.name,
        f"{placement.num_engines}{size}",
        str(placement.staleness),
        "-" if placement.token_budget is None else f"{placement.token_budget:,}",
        str(capacity.slots),
        f"{outcome.step_s:.1f}",
        f"{outcome.rollout_s:.1f}",
        f"{outcome.engine_idle:.0%}",
        f"{outcome.trainer_idle:.0%}",
        f"{one.card_idle:.0%}",
        "-" if capacity.rank_gb is None else f"{capacity.rank_gb:.0f}",
        "-" if capacity.engine_gb is None else f"{capacity.engine_gb:.0f}",
        ("" if capacity.fits else "does not fit; ") + (", ".join(capacity.waits) or "nothing"),
    )


def verdict(planned: Sequence[PlacementResult]) -> str:
    """The best in a sentence, and what it gains."""
    best = choose(planned)
    if best is None:
        return "no placement fits: more cards, LoRA, or a smaller token budget (docs/memory.md)"
    placement, found = best.placement, margins(best, planned)
    words = {"next": "the next division of the cards takes", "fresh": "no staleness takes",
             "today": "shared cards without staleness take"}  # fmt: skip
    gains = "; ".join(f"{words[name]} {share:+.0%}" for name, share in found.items())
    divided = f"{placement.rollout_cards} cards for engines, {placement.train_cards} for ranks"
    cards = "all cards shared" if placement.shares_cards else divided
    if placement.critic_cards:
        cards += f", {placement.critic_cards} for the critic"
    seconds = f"{best.outcome.step_s:.1f} s a step"
    line = f"best: {cards}, staleness {placement.staleness}: {seconds}; {gains}"
    options = " ".join(f"{key}={value}" for key, value in changes(best.placement).items())
    return f"{line}\noptions: {options}"


def as_json(one: PlacementResult) -> dict[str, Any]:
    """All that is known of a placement; seconds, shares, and GB of 10^9 bytes."""
    return {**asdict(one.placement), **asdict(one.capacity), **asdict(one.outcome),
            "num_engines": one.placement.num_engines, "card_idle": one.card_idle}  # fmt: skip


UNUSED = ("data.train_files=-", "data.val_files=-")
"""Options that a run must have and a plan does not read."""
NO_MODEL = "-"
USUAL = (0.05, 0.35, 0.6)
"""Shares of 0, 1 and 2 searches."""


def start(options: PlanOptions) -> int:
    """Plan and print; returns the exit code. Raises UserError."""
    planned = plan_all(options)
    if options.json:
        best = choose(planned)
        found = {"best": None if best is None else as_json(best), "margins": margins(best, planned),
                 "placements": [as_json(one) for one in planned]}  # fmt: skip
        sys.stdout.write(json.dumps(found) + "\n")
    else:
        sys.stdout.write(f"{table(planned[: options.top])}\n\n{verdict(planned)}\n")
    return 0


def plan_all(options: PlanOptions) -> list[PlacementResult]:
    """Every placement that was asked for, the fastest that fit first. Raises UserError."""
    if problems := list(options.dialogue.conflicts()):
        raise ConfigError("\n".join(problems))
    config = compose(options)
    placements = _placements(options, config)
    run = None if options.run is None else read_run(options.run, config)
    load = build_workload(options, config, run)
    batches = [load.draw(options.seed + i) for i in range(min(options.steps, 4))]
    costs = _costs(options, config, run, load)
    card_gb = 0.0 if config.trainer.device == "cpu" else options.card_gb
    found = [
        simulate_placement(
            one, costs, batches, estimate_capacity(one, costs, batches[0], card_gb), options.steps
        )
        for one in placements
    ]
    return sorted(found, key=lambda one: (not one.capacity.fits, one.outcome.step_s))


def compose(options: PlanOptions) -> Config:
    """The options of the training run. Raises ConfigError."""
    words = [*UNUSED, f"actor_rollout_ref.model.path={NO_MODEL}", *options.options]
    if options.run is None:
        return cli.compose(["--config-name", options.preset, *words])
    if options.preset != PlanOptions.preset:
        fix = "leave it out: the run's config.yaml has its options"
        raise ConfigError(explain("--preset", f"{options.preset} with --run", "one of them", fix))
    if not (options.run / "config.yaml").is_file():
        fix = "name the folder trainer.default_local_dir of a run"
        raise ConfigError(explain("--run", options.run, "a folder with config.yaml", fix))
    return cli.compose(["--config-name=config", f"--config-dir={options.run}", *options.options])


def build_workload(options: PlanOptions, config: Config, run: Run | None) -> Workload:
    """What the dialogues of a step are like. Raises ConfigError."""
    given = options.dialogue
    most = config.max_turns + 1
    searches = shares("--searches", given.searches) if given.searches else list(USUAL[:most])
    if not sum(searches) or len(searches) > most:
        expected = f"shares of 0 to {config.max_turns} searches (max_turns), one above 0"
        fix = "give one share for each number of searches, or max_turns=N"
        raise ConfigError(explain("--searches", repr(given.searches), expected, fix))
    return Workload(
        config.data.train_batch_size,
        config.actor_rollout_ref.rollout.n_agent,
        LogNormal(given.prompt_tokens, given.prompt_tokens),
        LogNormal(given.turn_tokens, given.turn_tokens_p99),
        LogNormal(given.observation_tokens, given.observation_tokens),
        tuple(searches),
        LogNormal(given.search_p50, given.search_p99),
        config.data.max_response_length,
        config.data.max_obs_length,
        () if run is None else run.dialogues,
    )


def _costs(options: PlanOptions, config: Config, run: Run | None, load: Workload) -> Costs:
    """Given rates, those that the run measured, and those computed from model and card."""
    path = config.actor_rollout_ref.model.path
    shape = None if path == NO_MODEL else read_shape(path)
    critic = None if config.critic_path == path else read_shape(config.critic_path)
    costs = Costs(config, options.rates, shape, critic)
    if run is None:
        return costs
    costs = replace(costs, rates=run.rates(options.rates, config))
    observed = run.observations(config, load.search_s, config.trainer.device != "cpu")
    is_stale = config.actor_rollout_ref.rollout.max_staleness > 0
    # Of a run that samples ahead, timing_s/gen is what is left of the wait, not the rollout.
    if not observed or options.rates.decode or is_stale:
        return costs
    size = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    begin = costs.engine_rates(observed[0].batch, size, observed[0].slots)
    fitted = fit_engine(observed, begin, options.rates.prefill_tokens_s is not None)
    rates = replace(costs.rates, prefill_tokens_s=fitted.prefill_tokens_s)
    return replace(costs, rates=rates, decode=(fitted.step_s, fitted.sequence_s))


def _placements(options: PlanOptions, config: Config) -> list[Placement]:
    """Those that were asked for. Raises ConfigError where none is possible."""
    rollout = numbers("--rollout-cards", options.rollout_cards) or list(range(options.cards))
    budgets: list[int | None] = [*numbers("--token-budgets", options.token_budgets, 1)]
    sizes = numbers("--tensor-parallel", options.tensor_parallel, 1)
    sizes = sizes or [config.actor_rollout_ref.rollout.tensor_model_parallel_size]
    if options.rates.decode and len(sizes) > 1:
        fix = "give --decode for one size at a time"
        raise ConfigError(explain("--tensor-parallel", options.tensor_parallel, "one size", fix))
    stale = numbers("--staleness", options.staleness)
    critics = config.num_critic_ranks if config.has_own_critic else 0
    sp_size = config.actor_rollout_ref.actor.ulysses_sequence_parallel_size
    ways = divisions(options.cards, rollout, stale, budgets or [None], sizes, critics)
    found = [way for way in ways if way.train_cards % sp_size == 0]
    if not found:
        got = f"{options.rollout_cards or 'all'}, with engines of {sizes} cards"
        beside = f", {critics} of them the critic's" if critics else ""
        ranks = "a rank" if sp_size == 1 else f"ranks by {sp_size}"
        expected = f"whole engines, {ranks}, and a staleness, on {options.cards} cards{beside}"
        raise ConfigError(explain("--rollout-cards", got, expected, "give other numbers of cards"))
    return found


def numbers(flag: str, text: str, least: int = 0) -> list[int]:
    """Whole numbers with commas between them; none of an empty text. Raises ConfigError."""
    found = [float(x) for x in shares(flag, text)] if text else []
    if any(x < least or x != int(x) or x > MAX_NUMBER for x in found):
        expected = f"whole numbers from {least} to {MAX_NUMBER}, with commas between them"
        raise ConfigError(explain(flag, repr(text), expected, f"{flag} {least},{least + 1}"))
    return [int(x) for x in dict.fromkeys(found)]


def shares(flag: str, text: str) -> list[float]:
    """Numbers from 0 on, with commas between them. Raises ConfigError."""
    try:
        found = [float(word) for word in text.split(",")]
    except ValueError:
        found = [-1.0]
    if not all(0 <= x <= MAX_NUMBER for x in found):  # false for NaN
        expected = "numbers of 0 or more, with commas between them"
        raise ConfigError(explain(flag, repr(text), expected, f"{flag} 1,2"))
    return found
