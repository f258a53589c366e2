"""From recorded trajectories to demonstrations: exact tokens, criteria and reasons."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes import EOS, ByteTokenizer
from tests.verl.trainer.recording import RecordingReplicas, prompts, score_by_sample
from verl.agent.environment import Environment
from verl.batch import TokenBatch
from verl.config import Config
from verl.data.sampler import PromptSampler
from verl.data.trajectories import (
    HEADER,
    fingerprint,
    prepare_folder,
    read_header,
    read_rows,
    write_step,
)
from verl.errors import ConfigError, DataError
from verl.ext.retry import RetryingRollout
from verl.ext.sft import rejection_sampling
from verl.ext.sft.candidates import choose
from verl.ext.sft.demonstrations import load_demonstrations
from verl.ext.sft.rejection_sampling import Criteria
from verl.monitor.performance import Timings
from verl.rewards.interface import EachAlone, Reward
from verl.trainer.collect import RolloutCollector
from verl.types import Origin, Prompt, Segment, Status, Trajectory, start_trajectory


class BytesWithVocabulary(ByteTokenizer):
    """A byte tokenizer with a vocabulary, of which a fingerprint can be made."""

    extra: tuple[str, ...] = ()

    def get_vocab(self) -> dict[str, int]:
        words = [*map(str, range(256)), *self.all_special_tokens, *self.extra]
        return {word: i for i, word in enumerate(words)}


class OtherBytes(BytesWithVocabulary):
    extra = ("more",)


TOKENIZER = BytesWithVocabulary()


def policy(text: str, *leading_ids: int) -> Segment:
    ids = (*leading_ids, *text.encode())
    return Segment(Origin.POLICY, ids, text, (-0.5,) * len(ids))


def observation(text: str) -> Segment:
    return Segment(Origin.OBSERVATION, tuple(text.encode()), text)


def trajectory(uid: str, *segments: Segment, searches: int = 0, **fields: Any) -> Trajectory:
    prompt = Prompt(uid, tuple(f"{uid}?".encode()), "nq", ("x",), {}, f"{uid}?")
    started = start_trajectory(prompt, group=f"1/{uid}")
    finished = dataclasses.replace(
        started, segments=[*started.segments, *segments], status=Status.ANSWERED, **fields
    )
    finished.stats |= {"valid_actions": searches + 1.0, "answered": 1.0}
    return finished


def record(folder: Path, step: int, *scored: tuple[Trajectory, float]) -> None:
    """Write the trajectories of a step with their scores."""
    prepare_folder(folder, TOKENIZER)
    write_step(folder, step, [t for t, _ in scored], [Reward(s, {"em": s}) for _, s in scored])


def texts(folder: Path, **criteria: Any) -> list[str]:
    """Return the last policy text of each chosen trajectory."""
    kept, _ = choose(folder, Criteria(**criteria))
    return [str(c.segments[-1]["text"]) for c in kept]


def test_masks_and_ids_are_those_of_the_run(tmp_path: Path) -> None:
    """Ids that no encoding produces are kept as sampled, with the trajectory's masks."""
    opening = Segment(Origin.PROMPT, (200, 201), "<think>")
    made = trajectory(
        "a", opening, policy("<search>q", EOS, 255), observation("docs"), policy("answer", 254)
    )
    record(tmp_path / "rollouts", 1, (made, 1.0))
    out = tmp_path / "sft.jsonl"
    arguments = ["--rollouts", str(tmp_path / "rollouts"), "--out", str(out)]
    assert rejection_sampling.main(arguments) == 0
    loaded = TokenBatch.from_trajectories(load_demonstrations(str(out), TOKENIZER, 100))
    sampled = TokenBatch.from_trajectories([made])
    for name in ("input_ids", "policy_mask", "response_mask"):
        assert torch.equal(loaded.tokens[name], sampled.tokens[name])
    assert loaded.offsets.tolist() == sampled.offsets.tolist()


def test_sampled_segments_have_weight_versions_and_log_probs(tmp_path: Path) -> None:
    """They are exact, so that a loss can be computed again; unknown log-probs are null."""
    prepare_folder(tmp_path, TOKENIZER)
    known = Segment(Origin.POLICY, (5, 6), "x", (-0.1, -2.5e-7), weight_version=3)
    unknown = Segment(Origin.POLICY, (5,), "x", (float("nan"),), weight_version=4)
    made = trajectory("a", observation("docs"), known, unknown)
    write_step(tmp_path, 1, [made], [Reward(1.0)])
    ((_, row),) = read_rows(tmp_path)
    prompt, docs, first, second = row["segments"]
    assert not {"log_probs", "weight_version"} & {*prompt, *docs}
    assert (first["log_probs"], first["weight_version"]) == ([-0.1, -2.5e-7], 3)
    assert (second["log_probs"], second["weight_version"]) == ([None], 4)


def test_an_end_of_turn_is_added_once(tmp_path: Path) -> None:
    """It is appended to the last policy segment only if the policy did not write it."""
    out = tmp_path / "sft.jsonl"
    open_turn, closed = policy("x"), policy("y<eos>")
    closed = dataclasses.replace(closed, ids=(*b"y", EOS), log_probs=(0.0,) * 2)
    record(tmp_path, 1, (trajectory("a", open_turn), 1.0), (trajectory("b", closed), 1.0))
    assert rejection_sampling.main(["--rollouts", str(tmp_path), "--out", str(out)]) == 0
    found = load_demonstrations(str(out), TOKENIZER, 100, end_of_turn="<eos>")
    assert [t.segments[-1].ids for t in found] == [(*b"x", EOS), (*b"y", EOS)]


def test_reasons_and_choice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Trajectories are dropped and counted by score, status, length, duplicates and per_prompt."""
    once = trajectory("a", policy("right"))
    record(
        tmp_path, 1,
        (once, 1.0),
        (trajectory("a", policy("righter")), 1.0),
        (trajectory("a", policy("wrong")), 0.0),
        (trajectory("b", policy("x" * 60)), 1.0),
    )  # fmt: skip
    record(
        tmp_path, 2,
        (once, 1.0),
        (trajectory("b", policy("fine")), 1.5),
        (dataclasses.replace(trajectory("c", policy("cut")), status=Status.OUT_OF_TURNS), 1.0),
        (trajectory("d", policy("nan")), float("nan")),
    )  # fmt: skip
    out = tmp_path / "out" / "sft.jsonl"
    arguments = ["--rollouts", str(tmp_path), "--out", str(out), "--max-tokens", "60"]
    assert rejection_sampling.main(arguments) == 0
    assert json.loads(capsys.readouterr().out) == {
        "read": 8, "kept": 2, "prompts": 2,
        "dropped": {"below_min_score": 2, "over_max_tokens": 1, "duplicate": 1,
                    "not_answered": 1, "over_per_prompt": 1},
    }  # fmt: skip
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(r["uid"], r["score"], r["step"]) for r in rows] == [("a", 1.0, 1), ("b", 1.5, 2)]


def test_a_component_can_decide_instead_of_the_score(tmp_path: Path) -> None:
    """If the score also rewards searching, `measure=em` rejects wrong answers."""
    prepare_folder(tmp_path, TOKENIZER)
    made = [trajectory("a", policy("wrong")), trajectory("b", policy("right"))]
    write_step(tmp_path, 1, made, [Reward(1.0, {"em": 0.0}), Reward(0.5, {"em": 1.0})])
    assert texts(tmp_path) == ["wrong"]
    assert texts(tmp_path, measure="em") == ["right"]
    with pytest.raises(DataError, match="--measure"):
        texts(tmp_path, measure="f1")


def test_preferences(tmp_path: Path) -> None:
    """short sorts by policy tokens, few_searches by searches first, random by seed."""
    record(
        tmp_path, 1,
        (trajectory("a", policy("short"), searches=2), 1.0),
        (trajectory("a", policy("longer"), searches=1), 1.0),
        (trajectory("a", observation("a long one"), policy("tiny"), searches=3), 1.0),
    )  # fmt: skip
    assert texts(tmp_path, prefer="short", per_prompt=2) == ["tiny", "short"]
    assert texts(tmp_path, prefer="few_searches", per_prompt=2) == ["longer", "short"]
    random = [texts(tmp_path, prefer="random", seed=seed) for seed in range(20)]
    assert random == [texts(tmp_path, prefer="random", seed=seed) for seed in range(20)]
    assert {choice for (choice,) in random} == {"short", "longer", "tiny"}


def test_the_collector_records_scored_trajectories(tmp_path: Path) -> None:
    """Failed trajectories are not recorded; a repeated step replaces its file."""
    config = Config()
    config.data.train_batch_size = 4
    config.actor_rollout_ref.rollout.n_agent = 3
    config.trainer.rollout_data_dir = str(tmp_path)
    config.trainer.max_lost_share = 0.5
    prepare_folder(tmp_path, TOKENIZER)
    replicas = RecordingReplicas([])
    replicas.fail = lambda start: start.prompt.uid in ("nq#0", "nq#1")
    rollout = RetryingRollout(replicas, Environment())
    collector = RolloutCollector(
        config, rollout, prompts(8), PromptSampler(8, 4), EachAlone(score_by_sample)
    )
    for step in (1, 2, 2):
        samples, _ = collector.collect(step, Timings())
        write_step(tmp_path, step, collector.sampled.trajectories, collector.sampled.rewards)
    rows = [row for _, row in read_rows(tmp_path)]
    assert {row["step"] for row in rows} == {1, 2}
    last = [row for row in rows if row["step"] == 2]
    assert not {"nq#0", "nq#1"} & {row["uid"] for row in rows}
    assert [r["uid"] for r in last] == [t.prompt.uid for t in samples.trajectories]
    assert [r["score"] for r in last] == [r.score for r in samples.rewards]
    assert [[(s["origin"], s["ids"]) for s in r["segments"]] for r in last] == [
        [(s.origin.name.lower(), list(s.ids)) for s in t.segments] for t in samples.trajectories
    ]


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    """Ids of another tokenizer are neither loaded nor mixed into a folder."""
    record(tmp_path, 1, (trajectory("a", policy("x")), 1.0))
    out = tmp_path / "sft.jsonl"
    assert rejection_sampling.main(["--rollouts", str(tmp_path), "--out", str(out)]) == 0
    assert fingerprint(OtherBytes()) != fingerprint(TOKENIZER) == fingerprint(BytesWithVocabulary())
    with pytest.raises(DataError, match="row 0"):
        load_demonstrations(str(out), OtherBytes(), 100)
    with pytest.raises(ConfigError):
        prepare_folder(tmp_path, OtherBytes())


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", "[" * 100_000, "\0"])
def test_a_damaged_header_is_refused(text: str, tmp_path: Path) -> None:
    """The error names the header."""
    (tmp_path / HEADER).write_text(text)
    with pytest.raises(DataError, match=f"{HEADER}: got .*expected fingerprints as a run"):
        read_header(tmp_path)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"segments": []}, "no policy ids"),
        ({"segments": [{"origin": "policy", "text": "x", "ids": [1]}]}, "no prompt at the start"),
        ({"segments": [{"origin": "policy", "text": "x"}]}, "KeyError 'ids'"),
        ({"segments": [{"origin": "who", "text": "x", "ids": []}]}, "KeyError 'who'"),
    ],
)
def test_malformed_exact_rows_are_refused(
    tmp_path: Path, change: dict[str, Any], expected: str
) -> None:
    """A row with ids must have a prompt, and ids in every segment."""
    path = tmp_path / "sft.jsonl"
    path.write_text(json.dumps({"tokenizer": fingerprint(TOKENIZER), **change}))
    with pytest.raises(DataError, match=expected):
        load_demonstrations(str(path), TOKENIZER, 100)


def test_nothing_to_keep_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An empty folder, strict criteria, a broken file and a bad option end with status 2."""
    arguments = ["--rollouts", str(tmp_path), "--out", str(tmp_path / "out.jsonl")]
    assert rejection_sampling.main(arguments) == 2
    assert "run.json" in capsys.readouterr().err
    record(tmp_path, 1, (trajectory("a", policy("x")), 0.5))
    assert rejection_sampling.main(arguments) == 2
    assert "dropped {'below_min_score': 1}" in capsys.readouterr().err
    (tmp_path / "step_00000002.jsonl").write_text('{"uid": "a"}\n')
    assert rejection_sampling.main(arguments) == 2
    assert "step_00000002.jsonl line 1: got KeyError" in capsys.readouterr().err
    assert rejection_sampling.main([*arguments, "--per_prompt", "0"]) == 2
    assert "per_prompt: got 0, expected 1 or more" in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()


def test_an_output_that_cannot_be_written_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With one line that names the file, and exit status 2."""
    record(tmp_path / "rollouts", 1, (trajectory("a", policy("x")), 1.0))
    (tmp_path / "file").touch()
    out = str(tmp_path / "file" / "sft.jsonl")
    assert rejection_sampling.main(["--rollouts", str(tmp_path / "rollouts"), "--out", out]) == 2
    message = capsys.readouterr().err
    assert str(tmp_path / "file") in message and message.count("\n") == 1
