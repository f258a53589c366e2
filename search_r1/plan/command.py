"""`search-r1 plan`: simulates the duration of a training step for each placement of the cards.

Options of the training run are given as `search-r1 train` takes them. Speeds and dialogues are
given by options, or measured by a run of a few steps (--run). Nothing is loaded or started. See
docs/placement.md.
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
    """The dialogues of a step. Dialogues that --run recorded replace all but the search times."""

    searches: str = ""
    """shares of the dialogues with 0, 1, 2 ... searches, separated by commas; default:
    0.05,0.35,0.6, up to max_turns searches"""
    prompt_tokens: Tokens = 180
    """median length of a prompt"""
    turn_tokens: Tokens = 100
    """median number of tokens that the policy samples in a turn"""
    turn_tokens_p99: Tokens = 300
    """99th percentile of the tokens of a turn"""
    observation_tokens: Tokens = 430
    """median number of tokens that a search adds"""
    search_p50: Annotated[float, Bounds(0)] = 0.5
    """median seconds of a search, under the load of a step"""
    search_p99: Annotated[float, Bounds(0)] = 5.0
    """99th percentile of the seconds of a search"""

    def conflicts(self) -> Iterator[str]:
        """Yield errors about percentiles that no log-normal distribution has."""
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
    """Speeds of the parts of a step; those not given are measured by --run or computed."""

    decode: str = ""
    """tokens/s of one engine by running sequences, as 64:5200,256:15000 (two or more points)"""
    prefill_tokens_s: Rate = None
    """prompt tokens that one engine reads per second; default: computed from --train-tflops"""
    train_tokens_s: Rate = None
    """tokens that one card trains on per second, including all passes of a step"""
    train_tflops: Positive = 400.0
    """TFLOP/s of a card in training; default: an assumption for an H100"""
    memory_tb_s: Positive = 2.3
    """TB/s at which decoding reads a card's memory; default: an assumption, 0.7 of an H100's"""
    step_ms: Annotated[float, Bounds(0)] = 3.0
    """ms of an engine step for scheduler and sampler; default: an assumption for vLLM"""
    publish_s: Seconds = None
    """seconds until new weights are written; default: at 0.54 GB/s, measured with files"""
    adopt_s: Seconds = None
    """seconds in which an engine loads new weights; default: at 1.4 GB/s, measured with files"""
    switch_s: Seconds = None
    """seconds in which engines on shared cards fall asleep and wake up; default: assumed 3"""
    driver_tokens_s: Rate = None
    """tokens/s of computing rewards and building the batch; default: 750,000, measured"""
    link_gb_s: Positive = 300.0
    """GB/s at which a rank gathers weights from the others; default: an assumption for NVLink"""
    host_gb_s: Positive = 20.0
    """GB/s between a card and its host, for what is offloaded; default: an assumption"""


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Simulates the duration of a training step for each placement of the cards."""

    options: tyro.conf.Positional[tuple[str, ...]] = ()
    """key=value options of the training run, as `search-r1 train` takes them; all in one place"""
    preset: str = "grpo_trainer"
    """preset of the run: grpo_trainer or ppo_trainer"""
    run: Path | None = None
    """folder of a run whose config.yaml, metrics.jsonl and recorded dialogues are used"""
    cards: Annotated[int, Bounds(1, 4096)] = 8
    """number of cards, of all machines together"""
    card_gb: Annotated[float, Bounds(0)] = 84.8
    """memory of a card in GB of 10^9 bytes (79 GiB); 0 ignores memory"""
    rollout_cards: str = ""
    """cards of engines only, separated by commas; 0: engines and ranks share all cards; default: 0
    and every division"""
    staleness: str = "0,1,2,4,8"
    """versions by which the weights that sample a batch may be behind, separated by commas"""
    token_budgets: str = ""
    """tokens of a rank's micro-batch, separated by commas; default: the run's"""
    tensor_parallel: str = ""
    """numbers of cards of one engine, separated by commas; default: the run's"""
    dialogue: DialogueOptions = field(default_factory=DialogueOptions)
    rates: RateOptions = field(default_factory=RateOptions)
    steps: Annotated[int, Bounds(1, 100)] = 4
    """number of measured steps, which follow the first steps"""
    seed: Seed = 0
    """seed of the dialogues that are drawn"""
    top: Annotated[int, Bounds(1)] = 15
    """number of placements in the table, the fastest first"""
    json: bool = False
    """print one JSON object with every placement"""


main = partial(run, "search_r1.plan.planning:start", PlanOptions, prog="search-r1 plan",
               description=__doc__)  # fmt: skip
