"""The simulated engine, compared with a loop over single steps, and its pauses."""

import random
from collections import deque
from collections.abc import Callable
from functools import partial

import pytest

from search_r1.plan.simulation import Clock, EngineRates, SimulatedEngine

RATES = EngineRates(step_s=0.02, sequence_s=0.001, prefill_tokens_s=5000, slots=4)
Request = tuple[float, int, int]
"""Seconds until the request arrives, tokens to read, tokens to sample."""


def constant(value: int) -> Callable[[], int]:
    """Return a function that returns `value`."""
    return lambda: value


def simulated_ends(requests: list[Request]) -> list[float]:
    """Return when each request ends on the simulated engine."""
    clock, ends = Clock(), [0.0] * len(requests)
    engine, num_left = SimulatedEngine(RATES, clock), len(requests)

    def end(i: int) -> None:
        nonlocal num_left
        ends[i], num_left = clock.now, num_left - 1

    for i, (arrival, prefill, tokens) in enumerate(requests):
        submit = partial(engine.submit, constant(prefill), tokens, partial(end, i))
        clock.after(arrival, submit)
    while num_left:
        clock.tick()
    return ends


def stepped_ends(requests: list[Request]) -> list[float]:
    """Return the same by an engine's loop: admit requests, read, sample a token for each."""
    waiting = deque(sorted(enumerate(requests), key=lambda item: item[1][0]))
    now, ends = 0.0, [0.0] * len(requests)
    tokens_left: dict[int, int] = {}
    while waiting or tokens_left:
        if not tokens_left:
            now = max(now, waiting[0][1][0])
        num_read = 0
        while waiting and waiting[0][1][0] <= now and len(tokens_left) < RATES.slots:
            i, (_, prefill, tokens) = waiting.popleft()
            num_read += prefill
            tokens_left[i] = tokens
        now += num_read / RATES.prefill_tokens_s + RATES.step(len(tokens_left))
        for i in list(tokens_left):
            tokens_left[i] -= 1
            if not tokens_left[i]:
                ends[i] = now
                del tokens_left[i]
    return ends


@pytest.mark.parametrize("seed", range(10))
def test_requests_end_as_in_a_loop_over_steps(seed: int) -> None:
    """With queue, batch and prefill: within two engine steps and one percent of the time."""
    draw = random.Random(seed)
    requests = [
        (draw.uniform(0, 8), draw.randrange(300), draw.randrange(20, 200)) for _ in range(40)
    ]
    ends, expected = simulated_ends(requests), stepped_ends(requests)
    assert max(ends) == pytest.approx(max(expected), rel=0.02)
    mean_error = sum(abs(a - b) for a, b in zip(ends, expected, strict=True)) / len(ends)
    assert mean_error < 2 * RATES.step(RATES.slots) + 0.01 * max(expected)


def test_a_single_request_takes_its_prompt_and_its_steps() -> None:
    """By the formula in the module's docstring."""
    assert simulated_ends([(1.0, 500, 10)]) == pytest.approx([1.0 + 0.1 + 10.5 * 0.021])


def test_a_paused_engine_ends_running_requests_and_starts_none() -> None:
    """After it resumes, with the new weights, the next request asks what it has to read."""
    clock = Clock()
    engine = SimulatedEngine(RATES, clock)
    events: list[tuple[str, float, int]] = []

    def log(name: str) -> None:
        events.append((name, clock.now, engine.version))

    def prefill_tokens() -> int:
        log("starts")
        return 0

    engine.submit(prefill_tokens, 10, partial(log, "first ended"))
    clock.after(0.05, partial(engine.pause, partial(log, "idle")))
    clock.after(0.06, partial(engine.submit, prefill_tokens, 10, partial(log, "second ended")))
    clock.after(5.0, partial(engine.resume, 1))
    while len(events) < 5:
        clock.tick()
    names = [name for name, _, _ in events]
    assert names == ["starts", "idle", "first ended", "starts", "second ended"]
    assert [time for _, time, _ in events[1:4]] == pytest.approx([0.2205, 0.2205, 5.0])
    assert events[3][2] == events[4][2] == 1


def test_busy_seconds_are_those_with_running_requests() -> None:
    """Gaps between requests do not count."""
    clock = Clock()
    engine = SimulatedEngine(RATES, clock)
    for arrival in (0.0, 10.0):
        clock.after(arrival, partial(engine.submit, constant(0), 10, lambda: None))
    for _ in range(4):
        clock.tick()
    assert engine.busy_s == pytest.approx(2 * 10.5 * 0.021)
