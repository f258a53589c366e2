"""Weighted sums and user-defined reward functions."""

import dataclasses
import re
from pathlib import Path

import pytest

from search_r1.rewards import RewardInput, build_reward
from search_r1.rewards.interface import OwnRewardError
from verl.errors import ConfigError

TEXT = "<answer>Barack Obama</answer>"
DIALOGUE = RewardInput([TEXT], [("policy", TEXT)], ["Obama"])


def test_a_weighted_sum_logs_every_part() -> None:
    """2 · F1 + 0.5 · cover-EM, with both scores and their components."""
    out = build_reward("em", weights={"f1": 2.0, "cover_em": 0.5})(DIALOGUE)
    assert out.score == pytest.approx(2 * 2 / 3 + 0.5)
    assert out.components["f1_score"] == pytest.approx(2 / 3)
    assert out.components["cover_em_score"] == 1.0
    assert out.components["em"] == 0.0


def test_a_users_own_function_scores(tmp_path: Path) -> None:
    """A user's function may return a number or a RewardOutput, alone or in a sum."""
    (tmp_path / "own.py").write_text(
        "from search_r1.rewards import RewardOutput\n"
        "def words(dialogue):\n    return len(dialogue.policy_texts[0].split())\n"
        "def parts(dialogue):\n    return RewardOutput(0.5, {'a': 1.0})\n"
    )
    assert build_reward(f"{tmp_path}/own.py:words")(DIALOGUE).score == 2.0
    assert build_reward(f"{tmp_path}/own.py:parts")(DIALOGUE).components == {"a": 1.0}
    both = build_reward("em", weights={f"{tmp_path}/own.py:words": -0.1, "f1": 1.0})(DIALOGUE)
    assert both.score == pytest.approx(-0.2 + 2 / 3)


HEAD = """import math, sys
import numpy as np
from fractions import Fraction
import torch
from search_r1.rewards import RewardOutput
def f(dialogue):
"""


@pytest.mark.parametrize(
    ("body", "got"),
    [
        ("raise KeyError('a\\nb')", r"KeyError in line 7: .*"),
        ("return int('x')", r"ValueError in line 7: .*"),
        ("return f(dialogue)", r"RecursionError in line 7: .*"),
        ("sys.exit(3)", r"SystemExit in line 7: 3"),
        ("assert dialogue is None", r"AssertionError in line 7:"),
        ("return np.linalg.inv([[0.0]])", r"LinAlgError in line 7: .*"),
        ("return None", "None"),
        ("return '0.5'", "'0.5'"),
        ("return b'1'", "b'1'"),
        ("return math.nan", "nan"),
        ("return -math.inf", "-inf"),
        ("return 10**400", "10{299}"),
        ("return np.array([True])", r"array\(\[ True\]\)"),
        ("return np.array([True, False])", r"array\(.*\)"),
        ("return torch.zeros(1)", r"tensor\(\[0.\]\)"),
        ("return torch.tensor(math.nan)", r"tensor\(nan\)"),
        ("return [0.5]", r"\[0.5\]"),
        ("return {'score': 1.0}", r"\{'score': 1.0\}"),
        ("return 1j", "1j"),
        ("return f", "<function f at .*>"),
        ("return 0.5, {}", r"\(0.5, \{\}\)"),
        ("return RewardOutput(None)", r"RewardOutput\(score=None, .*\)"),
        ("return RewardOutput(math.nan)", r"RewardOutput\(score=nan, .*\)"),
        ("return RewardOutput(1.0, {'a': math.nan})", r"RewardOutput\(.*nan.*\)"),
        ("return RewardOutput(1.0, {'a': 'x'})", r"RewardOutput\(.*'x'.*\)"),
        ("return RewardOutput(1.0, None)", r"RewardOutput\(.*None\)"),
        ("return RewardOutput(1.0, 3)", r"RewardOutput\(.*=3, .*\)"),
    ],
)
def test_whatever_an_own_function_does_in_mid_run_is_one_line(
    tmp_path: Path, body: str, got: str
) -> None:
    """The error names the function, the question, and what the function raised or returned."""
    (tmp_path / "own.py").write_text(f"{HEAD}    {body}\n")
    reward = build_reward("em", weights={f"{tmp_path}/own.py:f": 1.0, "em": 1.0})
    with pytest.raises(OwnRewardError) as caught:
        reward(dataclasses.replace(DIALOGUE, uid="train#7"))
    start = f"reward {tmp_path}/own.py:f at train#7: got "
    expected = ", expected a finite number, or a RewardOutput of such; fix: correct the function"
    assert re.fullmatch(f"{re.escape(start)}({got}){re.escape(expected)}", str(caught.value))


@pytest.mark.parametrize(
    "value",
    ["True", "np.True_", "np.float32(1)", "np.array(1.0)", "torch.tensor(1)", "Fraction(1)", "1"],
)
def test_every_kind_of_number_is_a_score(tmp_path: Path, value: str) -> None:
    """Single numbers of Python, numpy and torch are all accepted."""
    (tmp_path / "own.py").write_text(f"{HEAD}    return {value}\n")
    score = build_reward(f"{tmp_path}/own.py:f")(DIALOGUE).score
    assert (score, type(score)) == (1.0, float)


@pytest.mark.parametrize(("spec", "missing"), [("nowhere.py:f", r"nowhere\.py"), ("HERE:g", "'g'")])
def test_a_missing_function_is_named(tmp_path: Path, spec: str, missing: str) -> None:
    """The error names the option, and whether the file or the function is missing."""
    (tmp_path / "own.py").write_text("x = 1\n")
    with pytest.raises(ConfigError, match=rf"reward_model\.name: got \S*{missing},"):
        build_reward(spec.replace("HERE", f"{tmp_path}/own.py"))


def test_a_file_may_define_a_dataclass(tmp_path: Path) -> None:
    """A dataclass with string annotations looks its module up by name."""
    head = "from __future__ import annotations\nfrom dataclasses import dataclass\n"
    body = "@dataclass\nclass Price:\n    x: float = 2.0\n\ndef f(d): return Price().x\n"
    (tmp_path / "own.py").write_text(head + body)
    assert build_reward(f"{tmp_path}/own.py:f")(DIALOGUE).score == 2.0


def test_a_file_may_use_processes(tmp_path: Path) -> None:
    """Process pools find functions of the file by its module name."""
    head = "import multiprocessing\n\ndef price(x): return 2.0 * x\n\n"
    body = "def f(d):\n    with multiprocessing.get_context('fork').Pool(1) as pool:\n"
    (tmp_path / "own.py").write_text(f"{head}{body}        return pool.apply(price, (1,))\n")
    assert build_reward(f"{tmp_path}/own.py:f")(DIALOGUE).score == 2.0
