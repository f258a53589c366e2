"""Write runs with the trainer's own functions, with dialogues that the tests specify."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from search_r1.agent.tags import SEARCH_R1
from search_r1.retrieval.schema import Document
from verl.data.trajectories import prepare_folder, write_step
from verl.rewards.interface import Reward
from verl.trainer.validate import write_dialogues
from verl.types import Draw, Origin, Prompt, Segment, Status, Trajectory

HOSTILE = "<script>boom()</script><img src=x onerror=boom()></script>\u202e&amp;"


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


TOKENIZER = byte_tokenizer()


def segment(origin: Origin, text: str, version: int = 0) -> Segment:
    """Return a segment of one token per byte; a policy token i has the log-prob -i / 8."""
    ids = tuple(TOKENIZER.encode(text).ids)
    log_probs = tuple(-i / 8 for i in range(len(ids))) if origin is Origin.POLICY else ()
    return Segment(origin, ids, text, log_probs, version)


def dialogue(
    question: str,
    gold: Sequence[str],
    answer: str | None,
    searches: Sequence[tuple[str, Sequence[tuple[str, str]]]] = (),
    *,
    row: int = 0,
    sample: int = 0,
    group: str = "",
    version: int = 0,
) -> Trajectory:
    """Return a trajectory with searches: pairs of a query and its documents, (title, text)."""
    prompt = Prompt(f"train.parquet#{row}", (), "nq", tuple(gold), {"question": question})
    segments = [segment(Origin.PROMPT, f"Question: {question}\n")]
    for query, results in searches:
        segments.append(segment(Origin.POLICY, f"<search> {query} </search>", version))
        documents = [Document.from_title(str(i), *result) for i, result in enumerate(results)]
        segments.append(segment(Origin.OBSERVATION, SEARCH_R1.observation(documents)))
    last = "<think> no </think>" if answer is None else f"<answer> {answer} </answer>"
    segments.append(segment(Origin.POLICY, last, version))
    status = Status.OUT_OF_TURNS if answer is None else Status.ANSWERED
    stats = {"turns": len(searches) + 1.0}
    return Trajectory(prompt, segments, status, stats, draw=Draw(group, sample))


def reward_of(score: float) -> Reward:
    return Reward(score, {"em": score})


def write_rollouts(folder: Path, step: int, scored: Sequence[tuple[Trajectory, float]]) -> None:
    """Write the training trajectories of one step, each with its score."""
    rewards = [reward_of(score) for _, score in scored]
    write_step(folder / "rollouts", step, [trajectory for trajectory, _ in scored], rewards)


def write_validation(folder: Path, step: int, scored: Sequence[tuple[Trajectory, float]]) -> None:
    """Write the dialogues of one validation."""
    path = folder / "validation" / f"step_{step}.jsonl"
    rewards = [reward_of(score) for _, score in scored]
    write_dialogues(path, [trajectory for trajectory, _ in scored], rewards)


def add_metrics(folder: Path, step: int, **numbers: float | None) -> None:
    """Append a line to `metrics.jsonl`."""
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, **numbers}) + "\n")


def start_run(folder: Path, **options: object) -> Path:
    """Write a run that has just started: configuration, tokenizer, empty trajectory folder."""
    (folder / "model").mkdir(parents=True)
    TOKENIZER.save(str(folder / "model" / "tokenizer.json"))
    prepare_folder(folder / "rollouts", TOKENIZER)
    config = {
        "actor_rollout_ref": {"model": {"path": str(folder / "model")}},
        "trainer": {
            "rollout_data_dir": str(folder / "rollouts"),
            "guard": {"limits": {"patience": 2}},
        },
        "agent": {"tools": ["search"]},
        "template": "search_r1",
        **options,
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


PARIS = ("France", "Its capital is Paris.")
ROME = ("Italy", "Its capital is Rome.")


def write_run(folder: Path, **options: object) -> Path:
    """Write two steps and a validation, with every outcome of an answer and a hostile text."""
    start_run(folder, **options)
    question, gold = "What is the capital of France?", ["Paris"]
    write_rollouts(folder, 1, [
        (dialogue(question, gold, "Rome", [("capital", [ROME]), ("France", [PARIS, ROME])],
                  row=1, group="1/0"), 0.0),
        (dialogue(question, gold, None, [("Italy", [ROME])], row=1, sample=1, group="1/0"), 0.0),
        (dialogue("Who is 100% _real_?", ["El Niño"], "El Niño 😀", row=2, group="1/1"), 0.5),
    ])  # fmt: skip
    write_rollouts(folder, 2, [
        (dialogue(question, gold, "Paris", [("France", [PARIS])], row=1, group="2/0", version=1),
         1.0),
        (dialogue(question, gold, "Paris", row=1, sample=1, group="2/0", version=1), 1.0),
        (dialogue(HOSTILE, [HOSTILE], HOSTILE, [(HOSTILE, [(HOSTILE, HOSTILE)])], row=3,
                  group="2/1", version=1), 0.0),
    ])  # fmt: skip
    write_validation(folder, 2, [(dialogue(question, gold, "Paris", [("France", [PARIS])]), 1.0)])
    add_metrics(folder, 1, **{"actor/entropy": 1.0, "guard/health": 0.0, "a/b": None})
    add_metrics(folder, 2, **{"actor/entropy": 0.5, "guard/health": 0.0, "val/em": 1.0})
    return folder
