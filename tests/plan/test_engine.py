"""The simulated engine against a loop over single steps, and what holding it does."""

import random
from collections import deque
from functools import partial

import pytest

from search_r1.plan.simulation import Clock, EngineRates, SimulatedEngine

RATES = EngineRates(step_s=0.02, sequence_s=0.001, prefill_tokens_s=5000, slots=4)
Request = tuple[float, int, int]
"""When it comes, tokens that it reads, tokens that it samples."""


def simulated(requests: list[Request], rates: EngineRates = RATES) -> list[float]:
    """When each request ends, by the events."""
    clock, ends = Clock(), [0.0] * len(requests)

    def reads_of(reads: int) -> int:
        return reads

    engine, left = SimulatedEngine(rates, clock), len(requests)

    def ended(i: int) -> None:
        nonlocal left
        ends[i], left = clock.now, left - 1

    for i, (start, reads, tokens) in enumerate(requests):
        submit = partial(engine.submit, partial(reads_of, reads), tokens, partial(ended, i))
        clock.after(start, submit)
    while left:
        clock.tick()
    return ends


def stepped(requests: list[Request], rates: EngineRates = RATES) -> list[float]:
    """The same by the loop of an engine: admit, read, give everyone a token."""
    now, ends, coming = 0.0, [0.0] * len(requests), deque(sorted(enumerate(requests), key=_start))
    running: dict[int, int] = {}
    while coming or running:
        if not running:
            now = max(now, coming[0][1][0])
        reads = 0
        while coming and coming[0][1][0] <= now and len(running) < rates.slots:
            i, (_, read, tokens) = coming.popleft()
            reads, running[i] = reads + read, tokens
        now += reads / rates.prefill_tokens_s + rates.step(len(running))
        for i in list(running):
            running[i] -= 1
            if not running[i]:
                ends[i] = now
                del running[i]
    return ends


def _start(request: tuple[int, Request]) -> float:
    return request[1][0]


@pytest.mark.parametrize("seed", range(10))
def test_requests_end_as_a_loop_over_steps_has_them_end(seed: int) -> None:
    """With line, batch and prefill, to two steps of the engine and a hundredth of the time."""
    order = random.Random(seed)
    requests = [
        (order.uniform(0, 8), order.randrange(300), order.randrange(20, 200)) for _ in range(40)
    ]
    found, wanted = simulated(requests), stepped(requests)
    slack = 2 * RATES.step(RATES.slots)
    assert max(found) == pytest.approx(max(wanted), rel=0.02)
    late = sum(abs(a - b) for a, b in zip(found, wanted, strict=True)) / len(found)
    assert late < slack + 0.01 * max(wanted)


def test_one_request_alone_takes_its_prompt_and_its_steps() -> None:
    """By the formula of the module."""
    assert simulated([(1.0, 500, 10)]) == pytest.approx([1.0 + 0.1 + 10.5 * 0.021])


def test_a_held_engine_ends_what_runs_and_begins_nothing() -> None:
    """Until it is released, then under the new version, which is when the reading is asked for."""
    clock = Clock()
    engine = SimulatedEngine(RATES, clock)
    seen: list[tuple[str, float, int]] = []

    def reads() -> int:
        seen.append(("begins", clock.now, engine.version))
        return 0

    def note(name: str) -> None:
        seen.append((name, clock.now, engine.version))

    engine.submit(reads, 10, partial(note, "ended"))
    clock.after(0.05, partial(engine.hold, partial(note, "held")))
    clock.after(0.06, partial(engine.submit, reads, 10, partial(note, "second ended")))
    clock.after(5.0, partial(engine.release, 1))
    while len(seen) < 5:
        clock.tick()
    names = [name for name, _, _ in seen]
    assert names == ["begins", "held", "ended", "begins", "second ended"]
    assert [when for _, when, _ in seen[1:4]] == pytest.approx([0.2205, 0.2205, 5.0])
    assert seen[3][2] == seen[4][2] == 1


def test_busy_seconds_are_those_with_something_to_run() -> None:
    """Gaps between requests are not in them."""
    clock = Clock()
    engine = SimulatedEngine(RATES, clock)
    for start in (0.0, 10.0):
        submit = partial(engine.submit, lambda: 0, 10, lambda: None)
        clock.after(start, submit)
    for _ in range(4):
        clock.tick()
    assert engine.busy_s == pytest.approx(2 * 10.5 * 0.021)
