"""The benchmark of the step-time model: its paced engine, and the comparison it prints."""

import asyncio
import json
import re
import time

from benchmarks.step_time.cases import draw_cases
from benchmarks.step_time.comparing import Fitted, foresee, report
from benchmarks.step_time.paced import Pace, PacedEngine
from search_r1.plan.simulation import EngineRates
from verl.types import Sampling

PACE = Pace(0.005, 0.0, 1e6, slots=2, words_p50=40, sigma=0.0, search_share=0.0)


def test_the_paced_engine_takes_its_steps() -> None:
    """Two at once take as long as one, a third waits; equal seeds write equal texts."""

    async def play(count: int) -> tuple[float, list[str]]:
        engine, start = PacedEngine(PACE), time.perf_counter()
        asked = [engine.generate([1] * 20, Sampling(100, seed=7)) for _ in range(count)]
        found = await asyncio.gather(*asked)
        return time.perf_counter() - start, [one.text for one in found]

    two, texts = asyncio.run(play(2))
    three, _ = asyncio.run(play(3))
    assert texts[0] == texts[1] and texts[0].endswith("<answer> x </answer>")
    steps = len(texts[0])
    assert two >= 0.9 * steps * PACE.step_s
    assert three >= 1.9 * steps * PACE.step_s


def test_steps_of_a_known_engine_are_foreseen() -> None:
    """Measurements that the model itself made: what is left is what draws of searches leave."""
    truth = Fitted(EngineRates(0.015, 0.0008, 8000, 1), 9000.0, 50.0)
    cases, rows = draw_cases(7), []
    for case in cases:
        batch = case.workload(50.0).draw(5)
        (rollout_s, train_s), *_ = foresee(case, [batch], truth)
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
    found = re.search(r"median error ([\d.]+)%", step)
    assert found is not None and float(found[1]) < 6
