"""Runs `search-r1 plan`: reads options and a measured run, and prints the simulated placements."""

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
    estimate_capacity,
    placement_options,
    placements,
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
TRAINING_WITH_OWN_CRITIC = ("old_log_prob", "update_actor", "wait_critic")
"""The same for a critic on separate cards: its own seconds overlap with the actor's."""
PUBLISHING = ("gather", "write")
"""Parts of the phase `update_weights` before the engines load the weights."""
MAX_FITTED_STEPS = 8
"""Number of a run's last steps that the rates of the engine are fitted to."""
PRIOR_WEIGHT = 0.02
"""Weight of a rate's distance from its start value: doubling it counts as an error of 1.4 %."""


@dataclass(frozen=True)
class Observation:
    """The measured duration of a rollout."""

    batch: Batch
    num_engines: int
    slots: int
    seconds: float


def simulate_rollout(rates: EngineRates, observation: Observation) -> float:
    """Return the seconds that the rollout would take with engines of these rates."""
    no_costs = StepCosts(lambda _: 1e-9, lambda _: 0.0, 0.0, 0.0)
    setup = Setup(replace(rates, slots=observation.slots), observation.num_engines, no_costs)
    return simulate(setup, [observation.batch], steps=1).rollout_s


def fit_engine(
    observations: Sequence[Observation], start: EngineRates, knows_prefill: bool = False
) -> EngineRates:
    """Fit rates with which simulated rollouts take as long as the observed ones.

    Minimises the squared errors of the logarithms of the seconds. A rate that the observations do
    not determine stays near `start`; with `knows_prefill`, `prefill_tokens_s` is not fitted.
    """

    def rates_of(logs: np.ndarray) -> EngineRates:
        step_s, sequence_s, *fitted = np.exp(logs).tolist()
        prefill = fitted[0] if fitted else start.prefill_tokens_s
        return replace(start, step_s=step_s, sequence_s=sequence_s, prefill_tokens_s=prefill)

    def loss(logs: np.ndarray) -> float:
        rates = rates_of(logs)
        errors = [math.log(simulate_rollout(rates, o) / o.seconds) for o in observations]
        distance = float(np.sum((PRIOR_WEIGHT * (logs - start_logs)) ** 2))
        return fmean(error**2 for error in errors) + distance

    values = (start.step_s, start.sequence_s, start.prefill_tokens_s)
    start_logs = np.log(np.maximum(values[: 2 if knows_prefill else 3], 1e-9))
    result = minimize(loss, start_logs, method="Nelder-Mead",
                      options={"xatol": 0.01, "fatol": 1e-6, "maxfev": 400})  # fmt: skip
    return rates_of(result.x)


@dataclass(frozen=True)
class Run:
    """Metrics and dialogues that a run recorded."""

    metrics: tuple[Mapping[str, float], ...]
    """Metrics of each step, without the first, which is slower, if there are others."""
    steps: Mapping[int, tuple[Dialogue, ...]]
    """Dialogues by step; empty if the run did not record them."""

    @property
    def dialogues(self) -> tuple[Dialogue, ...]:
        """The dialogues of all steps."""
        return tuple(itertools.chain.from_iterable(self.steps.values()))

    def rates(self, options: RateOptions, config: Config) -> RateOptions:
        """Return `options` with measured rates for those that are not given."""
        tokens = self._mean("perf/total_num_tokens")
        phases = TRAINING_WITH_OWN_CRITIC if config.has_own_critic else TRAINING
        training = sum(self._mean(f"timing_s/{phase}") for phase in phases)
        weights = self._mean("timing_s/update_weights")
        rest = self._mean("timing_s/step") - self._mean("timing_s/gen") - training - weights
        measured: dict[str, Any] = {
            "train_tokens_s": tokens / training / config.num_ranks if training else None,
            "publish_s": sum(self._mean(f"timing_s/update_weights/{part}") for part in PUBLISHING),
            "adopt_s": self._mean("timing_s/update_weights/load"),
            "switch_s": self._mean("timing_s/update_weights/wake_up"),
            "driver_tokens_s": tokens / max(rest, 1e-3),
        }
        if config.actor_rollout_ref.rollout.max_staleness and not config.streams_weights:
            del measured["adopt_s"]  # the trainer does not wait for the engines, nor measure them
        missing = {name: s for name, s in measured.items() if getattr(options, name) is None}
        return replace(options, **missing)

    def observations(self, config: Config, search_s: LogNormal, on_gpu: bool) -> list[Observation]:
        """Return the rollouts of the last steps; none if their duration was not measured."""
        # With staleness, timing_s/gen is only the rest of the wait; without engines, it is reading.
        if config.actor_rollout_ref.rollout.max_staleness or not config.samples_rollouts:
            return []
        engines, slots = config.num_engines(on_gpu), config.max_num_seqs(on_gpu)
        random, group_size = np.random.default_rng(0), config.actor_rollout_ref.rollout.n_agent
        observations = []
        for row in self.metrics[-MAX_FITTED_STEPS:]:
            dialogues = self.steps.get(int(row["step"]))
            if dialogues:
                timed = tuple(add_search_times(dialogues, search_s, random))
                batch = Batch(timed, group_size)
                observations.append(Observation(batch, engines, slots, row["timing_s/gen"]))
        return observations

    def _mean(self, name: str) -> float:
        """Return the mean of a metric, which is 0 in steps without it."""
        return fmean(row.get(name) or 0.0 for row in self.metrics)


def read_run(folder: Path, config: Config) -> Run:
    """Read the metrics and dialogues of a run. Raises DataError."""
    path = folder / "metrics.jsonl"
    rows = [row for _, row in read_jsonl(str(path))] if path.is_file() else []
    metrics = [row for row in rows if not isinstance(row, BadRow) and "timing_s/gen" in row]
    if not metrics:
        expected = "metrics.jsonl with timing_s/gen: a run that trained for a step or more"
        fix = "name the folder trainer.default_local_dir of such a run"
        raise DataError(explain("--run", folder, expected, fix))
    steps: dict[int, list[Dialogue]] = {}
    record = config.trainer.rollout_data_dir
    for location, row in read_rows(record) if record is not None else ():
        step, dialogue = _read_dialogue(location, row)
        steps.setdefault(step, []).append(dialogue)
    return Run(tuple(metrics[1:] or metrics), {n: tuple(d) for n, d in steps.items()})


def _read_dialogue(location: str, row: Mapping[str, Any]) -> tuple[int, Dialogue]:
    """Return the step and the token counts of a recorded trajectory. Raises DataError."""
    prompt_tokens, turns = 0, list[Turn]()
    try:
        for segment in row["segments"]:
            count = len(segment["ids"])
            if segment["origin"] == "policy":
                turns.append(Turn(max(1, count)))
            elif segment["origin"] == "observation":
                observed = turns[-1].observation_tokens + count
                turns[-1] = replace(turns[-1], observation_tokens=observed)
            else:
                prompt_tokens += count
        return int(row["step"]), Dialogue(prompt_tokens, tuple(turns) or (Turn(1),))
    except (LookupError, TypeError, ValueError) as error:
        expected = "a trajectory as a run writes it"
        raise DataError(explain(location, repr(error), expected, "delete the file")) from error


SAME_TIME = 0.02
"""Relative difference up to which steps count as equally long, so that less staleness decides."""
COLUMNS = ("cards", "engines", "stale", "budget", "slots", "step s", "rollout s", "engines idle",
           "ranks idle", "cards idle", "rank GB", "engine GB", "offloaded to the host")  # fmt: skip


def choose(results: Sequence[PlacementResult]) -> PlacementResult | None:
    """Return the placement with the least staleness of the fastest ones that fit, if any fits."""
    fitting = [result for result in results if result.capacity.fits]
    if not fitting:
        return None
    limit = (1 + SAME_TIME) * min(result.outcome.step_s for result in fitting)
    fastest = [result for result in fitting if result.outcome.step_s <= limit]
    return min(fastest, key=lambda result: (result.placement.staleness, result.outcome.step_s))


def margins(best: PlacementResult | None, results: Sequence[PlacementResult]) -> dict[str, float]:
    """Return by which share the fastest placement of other kinds that fits takes longer.

    `next`: with another division of the cards; `fresh`: without staleness; `today`: on shared
    cards without staleness.
    """
    if best is None:
        return {}
    fitting = [(r.placement, r.outcome.step_s) for r in results if r.capacity.fits]
    rollout_cards = best.placement.rollout_cards
    seconds = {
        "next": [s for placement, s in fitting if placement.rollout_cards != rollout_cards],
        "fresh": [s for placement, s in fitting if not placement.staleness],
        "today": [s for placement, s in fitting if placement.shares_cards],
    }
    return {name: min(kind) / best.outcome.step_s - 1 for name, kind in seconds.items() if kind}


def table(results: Sequence[PlacementResult]) -> str:
    """Return a Markdown table of the placements."""
    rows = [COLUMNS, ("---",) * len(COLUMNS), *map(_cells, results)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cells(result: PlacementResult) -> tuple[str, ...]:
    placement, capacity, outcome = result.placement, result.capacity, result.outcome
    size = f" x {placement.tensor_parallel}" if placement.tensor_parallel > 1 else ""
    return (
        placement.name,
        f"{placement.num_engines}{size}",
        str(placement.staleness),
        "-" if placement.token_budget is None else f"{placement.token_budget:,}",
        str(capacity.slots),
        f"{outcome.step_s:.1f}",
        f"{outcome.rollout_s:.1f}",
        f"{1 - outcome.engine_busy:.0%}",
        f"{1 - outcome.trainer_busy:.0%}",
        f"{result.card_idle:.0%}",
        "-" if capacity.rank_gb is None else f"{capacity.rank_gb:.0f}",
        "-" if capacity.engine_gb is None else f"{capacity.engine_gb:.0f}",
        ("" if capacity.fits else "does not fit; ") + (", ".join(capacity.waits) or "nothing"),
    )


def verdict(results: Sequence[PlacementResult]) -> str:
    """Return the best placement, its margins and its options, in two lines."""
    best = choose(results)
    if best is None:
        return "no placement fits: more cards, LoRA, or a smaller token budget (docs/memory.md)"
    placement = best.placement
    subjects = {"next": "the next division of the cards takes", "fresh": "no staleness takes",
                "today": "shared cards without staleness take"}  # fmt: skip
    shares = margins(best, results).items()
    gains = "; ".join(f"{subjects[name]} {share:+.0%}" for name, share in shares)
    divided = f"{placement.rollout_cards} cards for engines, {placement.train_cards} for ranks"
    cards = "all cards shared" if placement.shares_cards else divided
    if placement.critic_cards:
        cards += f", {placement.critic_cards} for the critic"
    seconds = f"{best.outcome.step_s:.1f} s per step"
    line = f"best: {cards}, staleness {placement.staleness}: {seconds}; {gains}"
    options = " ".join(f"{key}={value}" for key, value in placement_options(placement).items())
    return f"{line}\noptions: {options}"


def as_json(result: PlacementResult) -> dict[str, Any]:
    """Return all figures of a placement: seconds, shares, and GB of 10^9 bytes."""
    return {**asdict(result.placement), **asdict(result.capacity), **asdict(result.outcome),
            "num_engines": result.placement.num_engines,
            "card_idle": result.card_idle}  # fmt: skip


NO_MODEL = "-"
PLACEHOLDERS = ("data.train_files=-", "data.val_files=-",
                f"actor_rollout_ref.model.path={NO_MODEL}")  # fmt: skip
"""Values of options that a run requires, and a plan does not."""
DEFAULT_SEARCH_SHARES = (0.05, 0.35, 0.6)
"""Shares of the dialogues with 0, 1 and 2 searches."""


def start(options: PlanOptions) -> int:
    """Plan, print the result, and return the exit status. Raises UserError."""
    results = plan_all(options)
    if options.json:
        best = choose(results)
        answer = {"best": None if best is None else as_json(best),
                  "margins": margins(best, results),
                  "placements": [as_json(result) for result in results]}  # fmt: skip
        sys.stdout.write(json.dumps(answer) + "\n")
    else:
        sys.stdout.write(f"{table(results[: options.top])}\n\n{verdict(results)}\n")
    return 0


def plan_all(options: PlanOptions) -> list[PlacementResult]:
    """Simulate every requested placement; returns the fastest that fit first. Raises UserError."""
    if problems := list(options.dialogue.conflicts()):
        raise ConfigError("\n".join(problems))
    config = compose(options)
    requested = _requested_placements(options, config)
    run = None if options.run is None else read_run(options.run, config)
    workload = build_workload(options, config, run)
    batches = [workload.draw(options.seed + i) for i in range(min(options.steps, 4))]
    costs = _build_costs(options, config, run, workload)
    card_gb = 0.0 if config.trainer.device == "cpu" else options.card_gb
    results = []
    for placement in requested:
        capacity = estimate_capacity(placement, costs, batches[0], card_gb)
        results.append(simulate_placement(placement, costs, batches, capacity, options.steps))
    return sorted(results, key=lambda result: (not result.capacity.fits, result.outcome.step_s))


def compose(options: PlanOptions) -> Config:
    """Return the options of the training run. Raises ConfigError."""
    if options.run is None:
        return cli.compose(["--config-name", options.preset, *PLACEHOLDERS, *options.options])
    if options.preset != PlanOptions.preset:
        fix = "leave it out: the run's config.yaml has its options"
        raise ConfigError(explain("--preset", f"{options.preset} with --run", "one of them", fix))
    if not (options.run / "config.yaml").is_file():
        fix = "name the folder trainer.default_local_dir of a run"
        raise ConfigError(explain("--run", options.run, "a folder with config.yaml", fix))
    return cli.compose(["--config-name=config", f"--config-dir={options.run}", *options.options])


def build_workload(options: PlanOptions, config: Config, run: Run | None) -> Workload:
    """Build the workload of a step from options and a run. Raises ConfigError."""
    dialogue = options.dialogue
    max_shares = config.max_turns + 1
    searches = list(DEFAULT_SEARCH_SHARES[:max_shares])
    if dialogue.searches:
        searches = parse_numbers("--searches", dialogue.searches)
    if not sum(searches) or len(searches) > max_shares:
        expected = f"shares of 0 to {config.max_turns} searches (max_turns), one above 0"
        fix = "give one share for each number of searches, or max_turns=N"
        raise ConfigError(explain("--searches", repr(dialogue.searches), expected, fix))
    return Workload(
        config.data.train_batch_size,
        config.actor_rollout_ref.rollout.n_agent,
        LogNormal(dialogue.prompt_tokens, dialogue.prompt_tokens),
        LogNormal(dialogue.turn_tokens, dialogue.turn_tokens_p99),
        LogNormal(dialogue.observation_tokens, dialogue.observation_tokens),
        tuple(searches),
        LogNormal(dialogue.search_p50, dialogue.search_p99),
        config.data.max_response_length,
        config.data.max_obs_length,
        () if run is None else run.dialogues,
    )


def _build_costs(options: PlanOptions, config: Config, run: Run | None, load: Workload) -> Costs:
    """Build the costs from given rates, else rates measured by `run`, else computed rates."""
    path = config.actor_rollout_ref.model.path
    shape = None if path == NO_MODEL else read_shape(path)
    critic = None if config.critic_path == path else read_shape(config.critic_path)
    costs = Costs(config, options.rates, shape, critic)
    if run is None:
        return costs
    costs = replace(costs, rates=run.rates(options.rates, config))
    on_gpu = config.trainer.device != "cpu"
    observations = run.observations(config, load.search_s, on_gpu)
    if not observations or options.rates.decode:
        return costs
    size = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    initial = costs.engine_rates(observations[0].batch, size, observations[0].slots)
    fitted = fit_engine(observations, initial, options.rates.prefill_tokens_s is not None)
    rates = replace(costs.rates, prefill_tokens_s=fitted.prefill_tokens_s)
    return replace(costs, rates=rates, decode=(fitted.step_s, fitted.sequence_s))


def _requested_placements(options: PlanOptions, config: Config) -> list[Placement]:
    """Return the placements that the options ask for. Raises ConfigError if none is possible."""
    rollout = parse_integers("--rollout-cards", options.rollout_cards)
    rollout = rollout or list(range(options.cards))
    budgets: list[int | None] = [*parse_integers("--token-budgets", options.token_budgets, 1)]
    sizes = parse_integers("--tensor-parallel", options.tensor_parallel, 1)
    sizes = sizes or [config.actor_rollout_ref.rollout.tensor_model_parallel_size]
    if options.rates.decode and len(sizes) > 1:
        fix = "give --decode for one size at a time"
        raise ConfigError(explain("--tensor-parallel", options.tensor_parallel, "one size", fix))
    staleness = parse_integers("--staleness", options.staleness)
    critic = config.num_critic_ranks if config.has_own_critic else 0
    sp_size = config.actor_rollout_ref.actor.ulysses_sequence_parallel_size
    possible = list(placements(options.cards, rollout, staleness, budgets or [None], sizes, critic,
                               sp_size))  # fmt: skip
    if not possible:
        got = f"{options.rollout_cards or 'all'}, with engines of {sizes} cards"
        of_critic = f", {critic} of them the critic's" if critic else ""
        ranks = "a rank" if sp_size == 1 else f"ranks by {sp_size}"
        expected = f"whole engines, {ranks}, and a staleness, on {options.cards} cards{of_critic}"
        raise ConfigError(explain("--rollout-cards", got, expected, "give other numbers of cards"))
    return possible


def parse_integers(flag: str, text: str, minimum: int = 0) -> list[int]:
    """Parse distinct integers separated by commas; none if `text` is empty. Raises ConfigError."""
    numbers = parse_numbers(flag, text) if text else []
    if any(x < minimum or x != int(x) or x > MAX_NUMBER for x in numbers):
        expected = f"whole numbers from {minimum} to {MAX_NUMBER}, with commas between them"
        raise ConfigError(explain(flag, repr(text), expected, f"{flag} {minimum},{minimum + 1}"))
    return [int(x) for x in dict.fromkeys(numbers)]


def parse_numbers(flag: str, text: str) -> list[float]:
    """Parse numbers of 0 or more separated by commas. Raises ConfigError."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = [-1.0]
    if not all(0 <= x <= MAX_NUMBER for x in numbers):  # false for NaN
        expected = "numbers of 0 or more, with commas between them"
        raise ConfigError(explain(flag, repr(text), expected, f"{flag} 1,2"))
    return numbers
