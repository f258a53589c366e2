"""Simulates training steps as discrete events of engines, searches and the trainer.

In each of its steps an engine gives every running request one token, which takes
`step_s + sequence_s * running` seconds. Reading a prompt delays all requests by its tokens divided
by `prefill_tokens_s`, whether or not it is read in chunks. Requests that exceed the slots wait in a
queue.

Batches of prompts start in order. Batch t + staleness starts when the weights of step t are
published, so that at most `staleness + 1` batches are in progress. The trainer takes batches in
order, each when all its dialogues have ended. An engine loads new weights between turns: it starts
no further turn until the running turns have ended. On shared cards engines and ranks take turns,
and the staleness is 0.
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
    """The speed of one engine."""

    step_s: float
    """Seconds of an engine step without its requests."""
    sequence_s: float
    """Seconds that each running request adds to a step."""
    prefill_tokens_s: float
    """Tokens of prompts and observations that the engine reads per second."""
    slots: int
    """Maximum number of running requests."""

    def step(self, running: int) -> float:
        """Return the seconds of a step with `running` requests."""
        return self.step_s + self.sequence_s * running


@dataclass
class Clock:
    """Simulated time, and the calls scheduled for later; simultaneous calls keep their order."""

    now: float = 0.0
    _calls: list[tuple[float, int, Call]] = field(default_factory=list)
    _count: itertools.count[int] = field(default_factory=itertools.count)

    def after(self, seconds: float, call: Call) -> None:
        """Schedule `call` for `seconds` from now."""
        heapq.heappush(self._calls, (self.now + seconds, next(self._count), call))

    def tick(self) -> None:
        """Advance to the next scheduled call, and make it."""
        self.now, _, call = heapq.heappop(self._calls)
        call()


@dataclass
class SimulatedEngine:
    """Runs requests, one for each turn of a dialogue; can be paused between turns."""

    rates: EngineRates
    clock: Clock
    version: int = 0
    """Version of the loaded weights."""
    num_dialogues: int = 0
    """Unfinished dialogues that were assigned to this engine."""
    busy_s: float = 0.0
    """Seconds in which at least one request was running."""
    _queue: deque[tuple[Callable[[], int], float, Call]] = field(default_factory=deque)
    _running: list[tuple[float, int, Call]] = field(default_factory=list)
    """Heap of the running requests, by the engine step in which they end."""
    _count: itertools.count[int] = field(default_factory=itertools.count)
    _num_steps: float = 0.0
    """Engine steps until now."""
    _prefill_s: float = 0.0
    """Seconds that reading the running requests' prompts still takes."""
    _updated_at: float = 0.0
    _last_event: int = 0
    """Number of the last scheduled event; the events before it are outdated."""
    _when_idle: Call | None = None
    _is_paused: bool = False

    def submit(self, prefill_tokens: Callable[[], int], tokens: int, done: Call) -> None:
        """Queue a request: reads `prefill_tokens()` when it starts, samples, then calls `done`."""
        # A request arrives, on average, in the middle of a step, and joins the next one.
        self._queue.append((prefill_tokens, tokens + 0.5, done))
        self._update()

    def pause(self, when_idle: Call) -> None:
        """Start no further request; call `when_idle` once the running requests have ended."""
        self._when_idle, self._is_paused = when_idle, True
        self._update()

    def resume(self, version: int) -> None:
        """Start requests again, with the weights of `version`."""
        self.version, self._is_paused = version, False
        self._update()

    def _update(self) -> None:
        """Bring the engine's state to the present, fill free slots, and schedule the next event."""
        self._advance()
        while self._queue and not self._is_paused and len(self._running) < self.rates.slots:
            prefill_tokens, tokens, done = self._queue.popleft()
            self._prefill_s += prefill_tokens() / self.rates.prefill_tokens_s
            heapq.heappush(self._running, (self._num_steps + tokens, next(self._count), done))
        self._last_event += 1
        if self._running:
            steps_left = max(0.0, self._running[0][0] - self._num_steps)
            seconds = self._prefill_s + steps_left * self.rates.step(len(self._running))
            self.clock.after(seconds, partial(self._end_request, self._last_event))
        elif self._when_idle is not None:
            when_idle, self._when_idle = self._when_idle, None
            when_idle()

    def _advance(self) -> None:
        """Account for the time since the last update, in which the same requests were running."""
        elapsed, self._updated_at = self.clock.now - self._updated_at, self.clock.now
        if not self._running:
            return
        self.busy_s += elapsed
        prefilled_s = min(elapsed, self._prefill_s)
        self._prefill_s -= prefilled_s
        self._num_steps += (elapsed - prefilled_s) / self.rates.step(len(self._running))

    def _end_request(self, event: int) -> None:
        """End the running request with the fewest tokens left, unless the event is outdated."""
        if event != self._last_event:
            return
        self._advance()
        self._num_steps = max(self._num_steps, self._running[0][0])  # corrects rounding
        _, _, done = heapq.heappop(self._running)
        self._update()
        done()


@dataclass(frozen=True)
class StepCosts:
    """Seconds of the parts of a training step that are not simulated in detail."""

    train_s: Callable[[Batch], float]
    """Seconds of the ranks' passes over a batch."""
    driver_s: Callable[[Batch], float]
    """Seconds in which only the driver works on a batch: rewards, and building the batch."""
    publish_s: float
    """Seconds until new weights are available to the engines."""
    adopt_s: float
    """Seconds in which an engine loads new weights."""
    switch_s: float = 0.0
    """Seconds in which engines on shared cards fall asleep and wake up."""


@dataclass(frozen=True)
class Setup:
    """The simulated run."""

    engine: EngineRates
    num_engines: int
    costs: StepCosts
    shares_cards: bool = True
    """Whether engines and ranks have the same cards."""
    staleness: int = 0

    def __post_init__(self) -> None:
        can_sample = not self.shares_cards or not self.staleness
        assert can_sample, "engines on shared cards cannot sample while the ranks train"


@dataclass(frozen=True)
class Outcome:
    """Mean durations and utilisation of the simulated steps."""

    step_s: float
    rollout_s: float
    """Seconds from the start of a step's batch to the end of its last dialogue."""
    engine_busy: float
    """Share of the time in which an engine runs requests, mean over engines."""
    trainer_busy: float
    """Share of the time in which the ranks compute."""


def simulate(setup: Setup, batches: Sequence[Batch], steps: int = 3) -> Outcome:
    """Simulate a run on `batches`, which repeat, and return the means of `steps` steps.

    The first steps, before `staleness + 1` batches are in progress, are not measured. On shared
    cards all steps are alike.
    """
    run = SimulatedRun(setup, batches)
    num_skipped = 0 if setup.shares_cards else setup.staleness + 1
    run.advance_to(num_skipped)
    start, engines_busy_s, trained_s = run.clock.now, run.engines_busy_s, run.trained_s
    run.advance_to(num_skipped + steps)
    elapsed = run.clock.now - start
    return Outcome(
        step_s=elapsed / steps,
        rollout_s=sum(run.rollouts_s[num_skipped:]) / steps,
        engine_busy=(run.engines_busy_s - engines_busy_s) / elapsed / setup.num_engines,
        trainer_busy=(run.trained_s - trained_s) / elapsed,
    )


@dataclass
class BatchInProgress:
    """A batch that was started and is not trained on yet."""

    batch: Batch
    started_at: float
    num_unfinished: int
    """Dialogues that have not ended."""
    rollout_s: float = 0.0
    """Seconds until all have."""


@dataclass
class SimulatedRun:
    """The state of a simulated run."""

    setup: Setup
    batches: Sequence[Batch]
    clock: Clock = field(default_factory=Clock)
    version: int = 0
    """Version of the published weights, which is the number of finished steps."""
    trained_s: float = 0.0
    """Seconds in which the ranks computed, in all steps."""
    rollouts_s: list[float] = field(default_factory=list)
    """Seconds of each finished step's rollout."""
    in_progress: dict[int, BatchInProgress] = field(default_factory=dict)
    """Batches in progress, by their step."""
    _is_training: bool = False

    def __post_init__(self) -> None:
        engine = partial(SimulatedEngine, self.setup.engine, self.clock)
        self.engines = [engine() for _ in range(self.setup.num_engines)]
        for step in range(self.setup.staleness + 1):
            self._start_batch(step)

    def advance_to(self, version: int) -> None:
        """Simulate until `version` is published."""
        while self.version < version:
            self.clock.tick()

    @property
    def engines_busy_s(self) -> float:
        """Busy seconds of all engines, up to the last event of each."""
        return sum(engine.busy_s for engine in self.engines)

    def _start_batch(self, step: int) -> None:
        """Start the dialogues of a batch, each group on the engine with the fewest dialogues."""
        batch = self.batches[step % len(self.batches)]
        self.in_progress[step] = BatchInProgress(batch, self.clock.now, len(batch.dialogues))
        ended = partial(self._dialogue_ended, step)
        for first in range(0, len(batch.dialogues), batch.group_size):
            engine = min(self.engines, key=lambda engine: engine.num_dialogues)
            group = batch.dialogues[first : first + batch.group_size]
            engine.num_dialogues += len(group)
            for i, dialogue in enumerate(group):
                SimulatedDialogue(dialogue, engine, self.clock, ended, i > 0).start_turn()

    def _dialogue_ended(self, step: int) -> None:
        progress = self.in_progress[step]
        progress.num_unfinished -= 1
        if not progress.num_unfinished:
            progress.rollout_s = self.clock.now - progress.started_at
            self._train_next()

    def _train_next(self) -> None:
        """Train on the next batch if it is complete and the trainer is free."""
        progress = self.in_progress.get(self.version)
        if self._is_training or progress is None or progress.num_unfinished:
            return
        self._is_training = True
        costs, batch = self.setup.costs, progress.batch
        seconds = costs.driver_s(batch) + (costs.switch_s if self.setup.shares_cards else 0.0)
        self.clock.after(seconds, partial(self._train, batch))

    def _train(self, batch: Batch) -> None:
        costs = self.setup.costs
        train_s = costs.train_s(batch)
        self.trained_s += train_s
        self.clock.after(train_s + costs.publish_s, self._publish)

    def _publish(self) -> None:
        """Have the engines load the new weights. On separate cards the step ends before that."""
        adopt_s, version = self.setup.costs.adopt_s, self.version + 1
        if self.setup.shares_cards:
            self.clock.after(adopt_s, self._finish_step)
            return
        for engine in self.engines:
            resume = partial(self._resume, engine, version)
            engine.pause(partial(self.clock.after, adopt_s, resume))
        self._finish_step()

    def _resume(self, engine: SimulatedEngine, version: int) -> None:
        """Resume an engine that has loaded `version`, unless it is already to load a newer one."""
        if version == self.version:
            engine.resume(version)

    def _finish_step(self) -> None:
        self.rollouts_s.append(self.in_progress.pop(self.version).rollout_s)
        self.version, self._is_training = self.version + 1, False
        self._start_batch(self.version + self.setup.staleness)
        self._train_next()


@dataclass
class SimulatedDialogue:
    """A dialogue on its engine, which alternates turns and searches."""

    dialogue: Dialogue
    engine: SimulatedEngine
    clock: Clock
    ended: Callable[[], None]
    """Called after the last turn."""
    shares_prompt: bool
    """Whether the engine reads the prompt for another member of the group."""
    num_turns: int = 0
    """Turns that have ended."""
    cached_version: int = -1
    """Version of the weights with which the engine has cached the dialogue's tokens."""

    def start_turn(self) -> None:
        """Submit the next turn to the engine."""
        turn = self.dialogue.turns[self.num_turns]
        self.engine.submit(self._prefill_tokens, turn.tokens, self._end_turn)

    def _prefill_tokens(self) -> int:
        """Return the number of tokens that the engine has not cached with its current weights."""
        is_cached = self.cached_version == self.engine.version
        self.cached_version = self.engine.version
        if self.num_turns == 0:
            return 0 if self.shares_prompt else self.dialogue.prompt_tokens
        earlier = self.dialogue.turns[: self.num_turns]
        if is_cached:
            return earlier[-1].observation_tokens
        context = sum(turn.tokens + turn.observation_tokens for turn in earlier)
        return self.dialogue.prompt_tokens + context

    def _end_turn(self) -> None:
        turn = self.dialogue.turns[self.num_turns]
        self.num_turns += 1
        if self.num_turns < len(self.dialogue.turns):
            self.clock.after(turn.search_s, self.start_turn)
            return
        self.engine.num_dialogues -= 1
        self.ended()
