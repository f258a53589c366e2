"""`search-r1 plan`: the step time of each placement, simulated, and the best with its margin.

Options of the training run are given as `search-r1 train` takes them; speeds and dialogues by hand,
or by a run of some steps (--run). Nothing is loaded or started. See docs/placement.md.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro

from search_r1.options import Bounds, Seed, run
from verl.errors import explain

Positive = Annotated[float, Bounds(gt=0)]
Seconds = Annotated[float | None, Bounds(0)]
Rate = Annotated[float | None, Bounds(gt=0)]
Tokens = Annotated[float, Bounds(1)]


@dataclass(frozen=True, kw_only=True)
class DialogueOptions:
    """What dialogues are like; those of --run, where it has them, replace all but the waiting."""

    searches: str = ""
    """shares of the dialogues that search 0, 1, 2 ... times, with commas; default: 0.05,0.35,0.6 as
    far as max_turns goes"""
    prompt_tokens: Tokens = 180
    """median length of a prompt"""
    turn_tokens: Tokens = 100
    """median of what the policy samples in a turn"""
    turn_tokens_p99: Tokens = 300
    """99th percentile of it"""
    observation_tokens: Tokens = 430
    """median of what a search adds"""
    search_p50: Annotated[float, Bounds(0)] = 0.5
    """median seconds of a search, under the load of a step"""
    search_p99: Annotated[float, Bounds(0)] = 5.0
    """99th percentile of it"""

    def conflicts(self) -> Iterator[str]:
        """Percentiles in the wrong order, or with no distribution that has them."""
        if self.search_p50 == 0 < self.search_p99:
            fix = "--search-p99 0, or a median above 0"
            yield explain("--search-p50", 0, "more than 0 where --search-p99 is", fix)
        for name, p50, p99 in (("turn-tokens", self.turn_tokens, self.turn_tokens_p99),
                               ("search", self.search_p50, self.search_p99)):  # fmt: skip
            if p99 < p50:
                fix = f"give --{name}-p99 {p50:g} or more"
                yield explain(f"--{name}-p99", p99, f"the median, {p50:g}, or more", fix)


@dataclass(frozen=True, kw_only=True)
class RateOptions:
    """How fast the parts are; what is not given is computed from the model and the card."""

    decode: str = ""
    """tokens/s of one engine by sequences at once, as 64:5200,256:15000 (two or more points)"""
    prefill_tokens_s: Rate = None
    """prompt tokens that one engine reads in a second; default: its cards at --train-tflops"""
    train_tokens_s: Rate = None
    """tokens that one card trains on in a second, all passes of a step together"""
    train_tflops: Positive = 400.0
    """TFLOP/s that a card reaches in training's passes; an assumption for an H100"""
    memory_tb_s: Positive = 2.3
    """TB/s at which decoding reads a card's memory; an assumption, 0.7 of an H100's"""
    step_ms: Annotated[float, Bounds(0)] = 3.0
    """ms of an engine's step besides; an assumption for vLLM's scheduler and sampler"""
    publish_s: Seconds = None
    """seconds until new weights are written; default: 0.54 GB/s, as measured through files"""
    adopt_s: Seconds = None
    """seconds until an engine has them; default: 1.4 GB/s, as measured"""
    switch_s: Seconds = None
    """seconds in which engines of shared cards fall asleep and wake up; default: 3, assumed"""
    driver_tokens_s: Rate = None
    """tokens of a batch that the driver scores and assembles in a second; default: 750,000, as
    measured"""
    link_gb_s: Positive = 300.0
    """GB/s at which a rank gathers weights from the others; an assumption for NVLink"""
    host_gb_s: Positive = 20.0
    """GB/s between a card and its host, for what is offloaded; an assumption"""


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The time of a training step on each placement, simulated; see docs/placement.md."""

    options: tyro.conf.Positional[tuple[str, ...]] = ()
    """key=value options of the training run, as `search-r1 train` takes them; all in one place"""
    preset: str = "grpo_trainer"
    """the run's preset: grpo_trainer or ppo_trainer"""
    run: Path | None = None
    """folder of a run whose config.yaml, metrics.jsonl and trajectories say how fast it was"""
    cards: Annotated[int, Bounds(1, 4096)] = 8
    """cards of the machine, or of all machines together"""
    card_gb: Annotated[float, Bounds(0)] = 84.8
    """memory of a card in GB of 10^9 bytes (79 GiB); 0 does not look at memory"""
    rollout_cards: str = ""
    """cards of engines alone, with commas; 0 shares all; default: 0 and each way to divide them"""
    staleness: str = "0,1,2,4,8"
    """versions of the weights that a batch may be behind, with commas"""
    token_budgets: str = ""
    """tokens of a rank's micro-batch, with commas; default: the run's"""
    tensor_parallel: str = ""
    """cards of one engine, with commas; default: the run's"""
    dialogue: DialogueOptions = field(default_factory=DialogueOptions)
    rates: RateOptions = field(default_factory=RateOptions)
    steps: Annotated[int, Bounds(1, 100)] = 4
    """steps that are simulated, after the first ones"""
    seed: Seed = 0
    """of the dialogues that are drawn"""
    top: Annotated[int, Bounds(1)] = 15
    """placements that the table shows, the fastest first"""
    json: bool = False
    """print one JSON object with every placement"""


main = partial(run, "search_r1.plan.planning:start", PlanOptions, prog="search-r1 plan",
               description=__doc__)  # fmt: skip
