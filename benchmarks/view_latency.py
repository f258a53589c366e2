"""Measure the response times of `search-r1 view` with 100,000 trajectories.

`python -m benchmarks.view_latency --out DIR` writes a run (random dialogues about the example's
questions and passages, correct more often from step to step), serves it in a separate process, and
sends the requests of each page in turn: first while the index is being built, then afterwards.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pandas as pd

from example.geography import CORPUS, DATA
from example.model import load_tokenizer
from verl.data.trajectories import HEADER, TOKENIZER, fingerprint, write_jsonl
from verl.files import atomic_write

NUM_DOCUMENTS = 3
REPEATS = 30
REQUESTS = {
    "list": "trajectories?step_from={low}",
    "last page": "trajectories?page=2000&step_to={high}",
    "words": "trajectories?words={word}+{other}",
    "words without a match": "trajectories?words=zyzzyva{low}",
    "in documents, not given": "trajectories?outcome=missed&step_from={low}",
    "lowest score of a range": "trajectories?order=score_low&searches_from=1&step_from={low}",
    "least expected tokens": "trajectories?order=log_prob_low&page=500&step_to={high}",
    "one trajectory by token": "trajectory?kind=train&step={step}&line={line}",
    "a question over the steps": "question?uid=train.parquet%23{question}",
    "runs": "runs",
    "metric names": "metrics",
    "60 curves": "curves?" + "&".join(f"name=family{i % 6}/metric{i}" for i in range(60)),
}
"""Requests by page, filled with random numbers and words because the server caches responses."""
WORDS = ("what", "which", "who", "how", "many", "code", "area", "population", "lies", "where")


@dataclass(frozen=True)
class Part:
    """A text and its token ids."""

    text: str
    ids: list[int]


class DialogueWriter:
    """Builds random dialogues from parts that are tokenized only once."""

    def __init__(self, seed: int) -> None:
        self.tokenizer = load_tokenizer()
        self.random = random.Random(seed)
        rows = pd.read_parquet(DATA / "train.parquet")
        self.questions = [row["question"] for row in rows["extra_info"][:1500]]
        self.gold = [list(row["ground_truth"]["target"]) for row in rows["reward_model"][:1500]]
        lines = CORPUS.read_text(encoding="utf-8").splitlines()
        contents = [json.loads(line)["contents"] for line in self.random.sample(lines, 800)]
        passages = [" ".join(self.random.sample(contents, 9)).replace("\n", " ") for _ in contents]
        self.documents = [self.part(f'\nDoc 1(Title: "Some facts") {text}') for text in passages]
        self.thoughts = [self.part(f"<think> {c[:90]} </think>\n") for c in contents[:200]]
        self.prompts = [self.part(f"Find out. Question: {q}\n") for q in self.questions]
        self.queries = [self.part(f"<search> {q} </search>") for q in self.questions]
        self.answers = [self.part(f"<answer> {g[0]} </answer>") for g in self.gold]
        self.open, self.close = self.part("\n\n<information>"), self.part("\n</information>\n\n")
        self.log_probs = [round(-self.random.expovariate(2), 12) for _ in range(5000)]

    def part(self, text: str) -> Part:
        return Part(text, self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def row(self, step: int, share: float, group: int, sample: int) -> dict[str, Any]:
        """Build the record of a trajectory that is correct with the probability `share`."""
        draw = self.random
        question = draw.randrange(len(self.questions))
        segments = [_segment("prompt", [self.prompts[question]])]
        num_searches = draw.randint(0, 3)
        for _ in range(num_searches):
            segments.append(self._turn([draw.choice(self.thoughts), self.queries[question]], step))
            documents = draw.sample(self.documents, NUM_DOCUMENTS)
            if draw.random() < share:
                documents[0] = self.part(f'\nDoc 1(Title: "Fact") It is {self.gold[question][0]}. ')
            segments.append(_segment("observation", [self.open, *documents, self.close]))
        is_correct = draw.random() < share
        is_out_of_turns = draw.random() < 0.1
        answer = question if is_correct else draw.randrange(len(self.answers))
        last_turn = [draw.choice(self.thoughts)]
        if not is_out_of_turns:
            last_turn.append(self.answers[answer])
        segments.append(self._turn(last_turn, step))
        score = float(is_correct and not is_out_of_turns)
        return {
            "step": step, "uid": f"train.parquet#{question}", "data_source": "geo",
            "question": self.questions[question], "ground_truth": self.gold[question],
            "group": f"{step}/{group}", "sample": sample,
            "status": "out_of_turns" if is_out_of_turns else "answered", "score": score,
            "components": {"em": score}, "stats": {"turns": num_searches + 1.0},
            "segments": segments,
        }  # fmt: skip

    def _turn(self, parts: Sequence[Part], step: int) -> dict[str, Any]:
        segment = _segment("policy", parts)
        start = self.random.randrange(4000)
        log_probs = self.log_probs[start : start + len(segment["ids"])]
        return segment | {"log_probs": log_probs, "weight_version": step - 1}


def _segment(origin: str, parts: Sequence[Part]) -> dict[str, Any]:
    return {"origin": origin, "text": "".join(p.text for p in parts),
            "ids": [i for p in parts for i in p.ids]}  # fmt: skip


def write_run(folder: Path, num_steps: int, size: int, seed: int = 0) -> None:
    """Write a run of `num_steps` steps with `size` trajectories each, and 120 metrics."""
    writer = DialogueWriter(seed)
    rollouts = folder / "rollouts"
    rollouts.mkdir(parents=True, exist_ok=True)
    (folder / "model").mkdir(exist_ok=True)
    writer.tokenizer.save_pretrained(str(folder / "model"))
    write_jsonl(rollouts / HEADER, [{TOKENIZER: fingerprint(writer.tokenizer)}])
    config = {"trainer": {"rollout_data_dir": str(rollouts)}, "template": "search_r1",
              "actor_rollout_ref": {"model": {"path": str(folder / "model")}}}  # fmt: skip
    (folder / "config.yaml").write_text(json.dumps(config))
    lines = []
    for step in range(1, num_steps + 1):
        share, path = 0.1 + 0.7 * step / num_steps, rollouts / f"step_{step:08d}.jsonl"
        # Each step has its own seed, so that an interrupted call continues with the same data.
        writer.random.seed(f"{seed} {step}")
        if not path.is_file():
            rows = [writer.row(step, share, i // 8, i % 8) for i in range(size)]
            write_jsonl(path, rows)
        metrics = {f"family{i % 6}/metric{i}": writer.random.gauss(share, 0.1) for i in range(120)}
        lines.append(json.dumps({"step": step, "guard/health": 0.0, **metrics}) + "\n")
    with atomic_write(folder / "metrics.jsonl") as part:
        part.write_text("".join(lines))


def request(client: httpx.Client, draw: random.Random, page: str, steps: int, size: int) -> float:
    """Send a page's request with random values; returns the ms until the response is complete."""
    path = REQUESTS[page].format(
        step=draw.randint(1, steps), line=draw.randrange(size), question=draw.randrange(1500),
        low=draw.randint(1, 50), high=max(1, steps - draw.randrange(9)),
        word=draw.choice(WORDS), other=draw.choice(WORDS),
    )  # fmt: skip
    began = time.perf_counter()
    response = client.get(f"/api/{path}")
    taken = 1000 * (time.perf_counter() - began)
    if response.status_code not in (200, 404):  # 404: the index has not reached the step yet
        response.raise_for_status()
    return taken


def measure(client: httpx.Client, steps: int, size: int) -> Iterator[str]:
    """Measure all pages until the index is complete, then again; yields the lines of the table."""
    draw = random.Random(1)
    while_building: dict[str, list[float]] = {page: [] for page in REQUESTS}
    began = time.perf_counter()
    while True:
        for page in REQUESTS:
            while_building[page].append(request(client, draw, page, steps, size))
        report = client.get("/api/runs").json()[0]["trajectories"]
        if report["count"] >= steps * size and not report["pending"]:
            break
        time.sleep(0.5)
    yield f"index of {steps * size:,} trajectories built in {time.perf_counter() - began:.0f} s\n"
    yield "| page | p50 | p95 | worst | p95 during indexing | worst during indexing |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: |"
    for page, building in while_building.items():
        complete = [request(client, draw, page, steps, size) for _ in range(REPEATS)]
        cells = [*np.percentile(complete, [50, 95, 100]), *np.percentile(building, [95, 100])]
        yield f"| {page} | " + " | ".join(f"{cell:.0f} ms" for cell in cells) + " |"


def main() -> None:
    """Write the run if it is missing, serve it, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--size", type=int, default=100, help="trajectories per step")
    options = parser.parse_args()
    run = options.out / "run"
    if not (run / "metrics.jsonl").is_file():
        write_run(run, options.steps, options.size)
    for old in options.out.glob("index/*"):
        old.unlink()
    port_file = options.out / "port"
    port_file.unlink(missing_ok=True)
    index = str(options.out / "index")
    command = [sys.executable, "-m", "search_r1.cli", "view", str(run), "--port", "0",
               "--port-file", str(port_file), "--index-dir", index]  # fmt: skip
    with subprocess.Popen(command) as server:
        try:
            while not port_file.is_file():
                time.sleep(0.05)
            url = f"http://127.0.0.1:{int(port_file.read_text())}"
            with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
                for line in measure(client, options.steps, options.size):
                    sys.stdout.write(line + "\n")
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
