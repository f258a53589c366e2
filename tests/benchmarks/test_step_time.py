"""The benchmark of the step-time model: its paced engine, and the comparison it prints."""

import asyncio
import json
import re
import time

from benchmarks.step_time.cases import draw_cases
from benchmarks.step_time.comparing import FittedRates, predict, report
from benchmarks.step_time.paced import Pace, PacedEngine
from search_r1.plan.simulation import EngineRates
from verl.types import Sampling

PACE = Pace(0.005, 0.0, 1e6, slots=2, words_p50=40, sigma=0.0, search_share=0.0)


def test_the_paced_engine_takes_its_steps() -> None:
    """With two slots a third request waits for the first two; equal seeds give equal texts."""

    async def generate(count: int) -> tuple[float, list[str]]:
        engine, began = PacedEngine(PACE), time.perf_counter()
        requests = [engine.generate([1] * 20, Sampling(100, seed=7)) for _ in range(count)]
        completions = await asyncio.gather(*requests)
        return time.perf_counter() - began, [completion.text for completion in completions]

    two_s, texts = asyncio.run(generate(2))
    three_s, _ = asyncio.run(generate(3))
    assert texts[0] == texts[1] and texts[0].endswith("<answer> x </answer>")
    steps = len(texts[0])
    assert two_s >= 0.9 * steps * PACE.step_s
    assert three_s >= 1.9 * steps * PACE.step_s


def test_steps_of_a_known_engine_are_predicted() -> None:
    """The measurements come from the model itself, so only the draws of search times differ."""
    truth = FittedRates(EngineRates(0.015, 0.0008, 8000, 1), 9000.0, 50.0)
    cases, rows = draw_cases(7), []
    for case in cases:
        batch = case.workload(50.0).draw(5)
        ((rollout_s, train_s),) = predict(case, [batch], truth)
        turns = [
            [d.prompt_tokens, [[t.tokens, t.observation_tokens] for t in d.turns]]
            for d in batch.dialogues
        ]
        rows.append(json.loads(json.dumps(
            {"rollout_s": rollout_s, "train_s": train_s, "dialogues": turns})))  # fmt: skip
    lines = report(cases, rows, calibrate=4).splitlines()
    assert lines[0].startswith("fitted to 4: step ") and lines[0].endswith("9,000 tokens/s trained")
    assert len([line for line in lines if re.match(r"\| \d+ x", line)]) == 3
    step = next(line for line in lines if line.startswith("step: 3 configurations"))
    error = re.search(r"median error ([\d.]+)%", step)
    assert error is not None and float(error[1]) < 6
