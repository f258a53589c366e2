"""Training steps in simulated time: engines, searches and trainer as discrete events.

An engine's step gives each running request one token and takes `step_s + sequence_s * running`
seconds. Reading a prompt delays every request by its tokens at `prefill_tokens_s`: chunked or not,
the engine has that much more to do. Requests beyond `slots` wait in line.

Batches of prompts begin in order, at most `staleness + 1` are in flight, and batch t + staleness
begins when the weights of step t are published. The trainer takes batches in order, each when all
its dialogues have ended. An engine takes new weights between turns: it begins no further turn
until those that run have ended. Where engines and ranks share cards, one side waits while the
other works.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from search_r1.plan.workload import Batch, Dialogue

Call = Callable[[], None]


@dataclass(frozen=True)
class EngineRates:
    """How fast one engine is."""

    step_s: float
    """Seconds of a step, however few requests run."""
    sequence_s: float
    """Seconds that each running request adds to it."""
    prefill_tokens_s: float
    """Tokens of prompts and observations that it reads in a second."""
    slots: int
    """Requests that run at once."""

    def step(self, running: int) -> float:
        """Seconds of a step of so many requests."""
        return self.step_s + self.sequence_s * running


@dataclass
class Clock:
    """Simulated time: calls in order of their moments, equal ones in order of asking."""

    now: float = 0.0
    _calls: list[tuple[float, int, Call]] = field(default_factory=list)
    _count: itertools.count[int] = field(default_factory=itertools.count)

    def after(self, seconds: float, call: Call) -> None:
        """Have `call` made so many seconds from now."""
        heapq.heappush(self._calls, (self.now + seconds, next(self._count), call))

    def tick(self) -> None:
        """Make the next call."""
        self.now, _, call = heapq.heappop(self._calls)
        call()


@dataclass
class SimulatedEngine:
    """Takes requests, which end in the order of their tokens; can be held between turns."""

    rates: EngineRates
    clock: Clock
    version: int = 0
    dialogues: int = 0
    """Unfinished ones that it was given."""
    busy_s: float = 0.0
    """Seconds in which something ran."""
    _line: deque[tuple[Callable[[], int], float, Call]] = field(default_factory=deque)
    _running: list[tuple[float, int, Call]] = field(default_factory=list)
    """By the step in which a request ends."""
    _count: itertools.count[int] = field(default_factory=itertools.count)
    _steps: float = 0.0
    """Made so far."""
    _reading_s: float = 0.0
    """Seconds of prompts that are not read yet."""
    _since: float = 0.0
    _planned: int = 0
    """Names the latest plan; earlier ones are void."""
    _when_held: Call | None = None
    _is_held: bool = False

    def submit(self, reads: Callable[[], int], tokens: int, done: Call) -> None:
        """Read as many tokens as `reads` says when it begins, sample `tokens`, and call `done`."""
        # A request arrives, on average, in the middle of a step, and joins the next one.
        self._line.append((reads, tokens + 0.5, done))
        self._change()

    def hold(self, then: Call) -> None:
        """Begin no further request; call `then` once those that run have ended."""
        self._when_held, self._is_held = then, True
        self._change()

    def release(self, version: int) -> None:
        """Go on, with weights of `version`."""
        self.version, self._is_held = version, False
        self._change()

    def _change(self) -> None:
        """Bring the engine to now, fill its slots, and plan its next moment."""
        self._advance()
        while self._line and not self._is_held and len(self._running) < self.rates.slots:
            reads, tokens, done = self._line.popleft()
            self._reading_s += reads() / self.rates.prefill_tokens_s
            heapq.heappush(self._running, (self._steps + tokens, next(self._count), done))
        self._planned += 1
        if self._running:
            left = max(0.0, self._running[0][0] - self._steps)
            seconds = self._reading_s + left * self.rates.step(len(self._running))
            plan = self._planned
            self.clock.after(seconds, lambda: self._end(plan))
        elif self._when_held is not None:
            then, self._when_held = self._when_held, None
            then()

    def _advance(self) -> None:
        elapsed, self._since = self.clock.now - self._since, self.clock.now
        if not self._running:
            return
        self.busy_s += elapsed
        read = min(elapsed, self._reading_s)
        self._reading_s -= read
        self._steps += (elapsed - read) / self.rates.step(len(self._running))

    def _end(self, plan: int) -> None:
        """The first of the running requests has all its tokens, unless plans have changed."""
        if plan != self._planned:
            return
        self._advance()
        self._steps = max(self._steps, self._running[0][0])  # what rounding left of it
        _, _, done = heapq.heappop(self._running)
        self._change()
        done()


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a step that do not depend on when what happens."""

    train_s: Callable[[Batch], float]
    """Of the ranks' passes over a batch."""
    driver_s: Callable[[Batch], float]
    """Of the driver, in which neither ranks nor engines work: rewards, building the batch."""
    publish_s: float
    """Until the weights lie where engines find them."""
    adopt_s: float
    """Until an engine has taken them."""
    switch_s: float = 0.0
    """Until engines of shared cards have fallen asleep and woken again."""


@dataclass(frozen=True)
class Setup:
    """What is simulated."""

    engine: EngineRates
    num_engines: int
    costs: StepCosts
    shares_cards: bool = True
    """Engines and ranks have the same cards."""
    staleness: int = 0


@dataclass(frozen=True)
class Outcome:
    """What a step came to, over the steps that were measured."""

    step_s: float
    rollout_s: float
    """From a batch's start to its last dialogue's end."""
    engine_busy: float
    """Share of the time in which an engine has something to run, mean over engines."""
    trainer_busy: float
    """Share of the time in which the ranks compute."""

    @property
    def engine_idle(self) -> float:
        return 1 - self.engine_busy

    @property
    def trainer_idle(self) -> float:
        return 1 - self.trainer_busy


def simulate(setup: Setup, batches: Sequence[Batch], steps: int = 3) -> Outcome:
    """The mean of `steps` steps once `batches`, taken in turn, were all in flight."""
    run = _Run(setup, batches)
    # Of shared cards without staleness the first step is as every other.
    warm = 0 if setup.shares_cards and not setup.staleness else setup.staleness + 1
    run.until(warm)
    start, engines, trainer = run.clock.now, run.engines_busy_s(), run.trained_s
    rollouts = len(run.rollouts)
    run.until(warm + steps)
    elapsed = run.clock.now - start
    spans = run.rollouts[rollouts:]
    return Outcome(
        step_s=elapsed / steps,
        rollout_s=sum(spans) / len(spans),
        engine_busy=(run.engines_busy_s() - engines) / elapsed / setup.num_engines,
        trainer_busy=(run.trained_s - trainer) / elapsed,
    )


@dataclass
class _Flight:
    batch: Batch
    started: float
    left: int


@dataclass
class _Run:
    """One simulated run; `version` counts the steps that were published."""

    setup: Setup
    batches: Sequence[Batch]
    clock: Clock = field(default_factory=Clock)
    version: int = 0
    trained_s: float = 0.0
    rollouts: list[float] = field(default_factory=list)
    _is_training: bool = False

    def __post_init__(self) -> None:
        count = self.setup.num_engines
        self.engines = [SimulatedEngine(self.setup.engine, self.clock) for _ in range(count)]
        self._flights: dict[int, _Flight] = {}
        for number in range(self.setup.staleness + 1):
            self._start(number)

    def until(self, version: int) -> None:
        while self.version < version:
            self.clock.tick()

    def engines_busy_s(self) -> float:
        """Of all engines; what runs counts up to its last event."""
        return sum(engine.busy_s for engine in self.engines)

    def _start(self, number: int) -> None:
        batch = self.batches[number % len(self.batches)]
        flight = _Flight(batch, self.clock.now, len(batch.dialogues))
        self._flights[number] = flight
        ended = partial(self._dialogue_ended, number)
        for first in range(0, len(batch.dialogues), batch.group_size):
            engine = min(self.engines, key=lambda engine: engine.dialogues)
            siblings = batch.dialogues[first : first + batch.group_size]
            engine.dialogues += len(siblings)
            for i, dialogue in enumerate(siblings):
                _Playing(dialogue, engine, self.clock, ended, shares_prompt=i > 0).turn()

    def _dialogue_ended(self, number: int) -> None:
        flight = self._flights[number]
        flight.left -= 1
        if not flight.left:
            self.rollouts.append(self.clock.now - flight.started)
            self._train_next()

    def _train_next(self) -> None:
        """Train on the next batch, if it is complete and the trainer is free."""
        flight = self._flights.get(self.version)
        if self._is_training or flight is None or flight.left:
            return
        self._is_training = True
        costs = self.setup.costs
        train = partial(self._train, flight.batch)
        if not self.setup.shares_cards:
            self.clock.after(costs.driver_s(flight.batch), train)
            return
        self._hold(lambda: self.clock.after(costs.driver_s(flight.batch) + costs.switch_s, train))

    def _hold(self, then: Callable[[], None]) -> None:
        """Stop every engine between turns, and call `then` when the last has come to that."""
        left = len(self.engines)

        def held() -> None:
            nonlocal left
            left -= 1
            if not left:
                then()

        for engine in self.engines:
            engine.hold(held)

    def _train(self, batch: Batch) -> None:
        seconds = self.setup.costs.train_s(batch)

        def trained() -> None:
            self.trained_s += seconds
            self.clock.after(self.setup.costs.publish_s, self._publish)

        self.clock.after(seconds, trained)

    def _publish(self) -> None:
        """New weights are there: engines take them, the next batch begins."""
        del self._flights[self.version]
        adopt = self.setup.costs.adopt_s
        version = self.version + 1
        if self.setup.shares_cards:
            self.clock.after(adopt, partial(self._adopted, version))
            return
        for engine in self.engines:
            release = partial(self._release, engine, version)
            engine.hold(partial(self.clock.after, adopt, release))
        self._published(version)

    def _release(self, engine: SimulatedEngine, version: int) -> None:
        """The engine goes on, unless still newer weights have come, for which it is held again."""
        if version == self.version:
            engine.release(version)

    def _adopted(self, version: int) -> None:
        for engine in self.engines:
            engine.release(version)
        self._published(version)

    def _published(self, version: int) -> None:
        self.version, self._is_training = version, False
        self._start(version + self.setup.staleness)
        self._train_next()


@dataclass
class _Playing:
    """One dialogue on its engine: a turn, a search, the next turn."""

    dialogue: Dialogue
    engine: SimulatedEngine
    clock: Clock
    ended: Callable[[], None]
    shares_prompt: bool
    """A sibling before it has the engine read the prompt."""
    number: int = 0
    version: int = -1
    """Of the weights under which its tokens are cached."""

    def turn(self) -> None:
        """Have the engine read what is new, or all after new weights, and sample the turn."""
        turn = self.dialogue.turns[self.number]
        self.engine.submit(self._reads, turn.tokens, self._sampled)

    def _reads(self) -> int:
        """Tokens that the engine has not cached under its present weights."""
        has_cached, self.version = self.version == self.engine.version, self.engine.version
        if self.number == 0:
            return 0 if self.shares_prompt else self.dialogue.prompt_tokens
        before = self.dialogue.turns[: self.number]
        if has_cached:
            return before[-1].observation_tokens
        sampled_and_observed = sum(turn.tokens + turn.observation_tokens for turn in before)
        return self.dialogue.prompt_tokens + sampled_and_observed

    def _sampled(self) -> None:
        turn = self.dialogue.turns[self.number]
        self.number += 1
        if self.number < len(self.dialogue.turns):
            self.clock.after(turn.search_s, self.turn)
            return
        self.engine.dialogues -= 1
        self.ended()
