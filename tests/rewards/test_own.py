"""Reward functions that were written for veRL or for the original Search-R1."""

import dataclasses
import tempfile
from pathlib import Path

import pytest

from search_r1.rewards import RewardInput, build_reward
from search_r1.rewards.interface import Origin, OwnRewardError
from search_r1.rewards.own import load_function
from verl.errors import ConfigError

DIALOGUE = RewardInput(
    ["<search>q</search>", "<answer>Paris</answer><|im_end|>\n"],
    [("prompt", "Who?"), ("policy", "<search>q</search>"), ("observation", "D"),
     ("policy", "<answer>Paris</answer><|im_end|>\n")],
    ["Paris"], "nq", uid="train#7", extra_info={"index": 3}, row_truth="Paris",
)  # fmt: skip
SIGNATURE = "data_source, solution_str, ground_truth, extra_info=None, **kwargs"


def score(folder: Path, body: str, signature: str = SIGNATURE, start: str = "def") -> object:
    """Score the dialogue with a function `compute_score` of this signature and body."""
    file = Path(tempfile.mkdtemp(dir=folder)) / "own.py"  # since a file is executed once
    file.write_text(f"{start} compute_score({signature}):\n    {body}\n")
    [output] = load_function(f"{file}:compute_score")([DIALOGUE])
    return output.score if not output.components else (output.score, dict(output.components))


@pytest.mark.parametrize(
    "signature",
    [
        SIGNATURE, "data_source, solution_str, ground_truth, extra_info", "*, solution_str, **rest",
        "solution_str, ground_truth, method='strict', format_score=0., score=1.", "solution_str",
    ],
)  # fmt: skip
@pytest.mark.parametrize("start", ["def", "async def"])
def test_a_function_gets_the_keywords_that_it_takes(
    signature: str, start: str, tmp_path: Path
) -> None:
    """The response is everything after the prompt, without the end of sequence."""
    body = "return float(solution_str == '<search>q</search>D<answer>Paris</answer>')"
    assert score(tmp_path, body, signature, start) == 1.0


def test_every_keyword_is_what_the_row_has(tmp_path: Path) -> None:
    """Source, ground truth and extra_info of the row, and the number of turns."""
    body = (
        "return float((data_source, ground_truth, extra_info) == "
        "('nq', 'Paris', {'index': 3, 'num_turns': 2}))"
    )
    assert score(tmp_path, body) == 1.0


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ("0.5", 0.5), ("True", 1.0), ("{'score': 0.5}", 0.5),
        ("{'score': 1, 'acc': True, 'pred': 'Paris', 'x': None}", (1.0, {"acc": 1.0})),
        ("{'score': 0.0, 'length': 3}", (0.0, {"length": 3.0})),
    ],
)  # fmt: skip
@pytest.mark.parametrize("start", ["def", "async def"])
def test_a_number_or_a_dict_with_score(
    returned: str, expected: object, start: str, tmp_path: Path
) -> None:
    """The other numbers of a dict are components; texts cannot be logged as metrics."""
    assert score(tmp_path, f"return {returned}", start=start) == expected


@pytest.mark.parametrize(
    "body",
    ["return None", "return float('nan')", "return {'acc': 1.0}", "return {'score': None}",
     "return {'score': float('inf')}", "return {'score': 1, 'acc': float('nan')}",
     "return [1.0]", "return '1'", "return ground_truth['target']", "raise KeyError('x')",
     "raise SystemExit(2)"],
)  # fmt: skip
@pytest.mark.parametrize("start", ["def", "async def"])
def test_a_reward_that_is_no_number_is_a_failure(body: str, start: str, tmp_path: Path) -> None:
    """It names the row, and is never a score of 0."""
    with pytest.raises(OwnRewardError, match=r"own.py:compute_score at train#7: got "):
        score(tmp_path, body, start=start)


def test_an_async_batch_is_awaited_together(tmp_path: Path) -> None:
    """All calls of a batch run at the same time, and the results keep their order."""
    (tmp_path / "own.py").write_text(
        "import asyncio\nwaiting = []\n"
        "async def compute_score(solution_str, extra_info):\n"
        "    waiting.append(1)\n"
        "    while len(waiting) < 3: await asyncio.sleep(0)\n"
        "    return extra_info['index']\n"
    )
    reward = load_function(f"{tmp_path}/own.py:compute_score")
    batch = [dataclasses.replace(DIALOGUE, extra_info={"index": i}) for i in range(3)]
    assert [output.score for output in reward(batch)] == [0.0, 1.0, 2.0]


def test_batches_share_one_event_loop(tmp_path: Path) -> None:
    """A client that the file made in the first batch still works in the second."""
    (tmp_path / "own.py").write_text(
        "import asyncio\nloops = set()\n"
        "async def compute_score(solution_str):\n"
        "    loops.add(asyncio.get_running_loop())\n    return len(loops)\n"
    )
    reward = load_function(f"{tmp_path}/own.py:compute_score")
    assert [reward([DIALOGUE])[0].score for _ in range(2)] == [1.0, 1.0]


def test_a_function_that_needs_more_is_refused_at_the_start(tmp_path: Path) -> None:
    """A parameter that nobody gives is named before the run."""
    with pytest.raises(ConfigError, match="missing a required argument: 'tokenizer'"):
        score(tmp_path, "return 1.0", "solution_str, ground_truth, tokenizer")


def test_it_can_be_part_of_a_sum(tmp_path: Path) -> None:
    """As any function of a user."""
    (tmp_path / "own.py").write_text("async def f(solution_str): return {'score': 2.0, 'a': 1}\n")
    spec = f"{tmp_path}/own.py:f"
    out = build_reward("", weights={"em": 1.0, spec: 0.5})(DIALOGUE)
    assert (out.score, out.components["a"]) == (2.0, 1.0)


ORIGINAL = """
import re

def compute_score(solution_str, ground_truth, method="strict", format_score=0.0, score=1.0):
    answers = re.findall(r"<answer>(.*?)</answer>", solution_str)
    if len(answers) {condition}:
        return 0
    return score if answers[-1].strip() in ground_truth["target"] else format_score
"""


@pytest.mark.parametrize("condition", ["<= 1", "< 1"])
def test_a_function_that_takes_one_answer_for_the_prompts_example_gets_the_prompt(
    condition: str, tmp_path: Path
) -> None:
    """The original's rewards do, and would score every right answer 0; veRL's own form does not."""
    (tmp_path / "own.py").write_text(ORIGINAL.format(condition=condition))
    rule = load_function(f"{tmp_path}/own.py:compute_score")

    def dialogue(response: str) -> RewardInput:
        prompt = "prompt", "<answer> Rome </answer>"
        segments: list[tuple[Origin, str]] = [prompt, ("policy", response)]  # type: ignore[list-item]
        return RewardInput([response], segments, ["Paris"], row_truth={"target": ["Paris"]})

    responses = "<answer> Paris </answer>", "<answer> Rome </answer>", "none"
    assert [o.score for o in rule([dialogue(r) for r in responses])] == [1.0, 0.0, 0.0]
    only_example = dialogue("<answer> Rome </answer>")
    only_example = dataclasses.replace(only_example, row_truth={"target": ["Rome"]})
    nothing = dataclasses.replace(dialogue("none"), row_truth={"target": ["Rome"]})
    assert [o.score for o in rule([only_example, nothing])] == [1.0, 0.0]
