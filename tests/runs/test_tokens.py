"""Texts of tokens, and the choice of the tokenizer."""

import json
from pathlib import Path

from search_r1.runs.tokens import find_tokenizer, pieces
from tests.runs.written import TOKENIZER, start_run
from verl.data.trajectories import HEADER


def test_pieces_join_to_the_text() -> None:
    """Also if a character takes several tokens: the last of them has it."""
    text = "El Niño 😀\n\n湖 x"
    ids = TOKENIZER.encode(text).ids
    found = pieces(TOKENIZER, ids)
    assert len(found) == len(ids) and "".join(found) == text
    assert found[ids.index(ids[5]) : 8] and found.count("") == 1 + 3 + 2  # ñ, 😀, 湖
    assert pieces(TOKENIZER, ids[:-3])[-1] != "" and pieces(TOKENIZER, []) == []


def test_another_tokenizer_is_not_used(tmp_path: Path) -> None:
    """Tokenizers are compared by their fingerprint; the reason is given if none is found."""
    run = start_run(tmp_path / "run")
    rollouts = run / "rollouts"
    config = {"actor_rollout_ref": {"model": {"path": str(run / "model")}}}
    assert find_tokenizer(run, rollouts, config)[0] is not None
    assert "no tokenizer.json" in find_tokenizer(run, rollouts, {})[1]
    checkpoint = run / "global_step_2" / "huggingface"
    checkpoint.mkdir(parents=True)
    TOKENIZER.save(str(checkpoint / "tokenizer.json"))
    assert find_tokenizer(run, rollouts, {})[0] is not None
    (checkpoint / "tokenizer.json").write_text('{"version": "9.0"}')
    assert "cannot be read" in find_tokenizer(run, rollouts, {})[1]
    assert find_tokenizer(run, rollouts, config)[0] is not None
    (rollouts / HEADER).write_text(json.dumps({"tokenizer": "another"}))
    (checkpoint / "tokenizer.json").unlink()
    assert "is not the tokenizer" in find_tokenizer(run, rollouts, config)[1]
