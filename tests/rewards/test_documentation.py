"""docs/guides/rewards.md: the example runs, the commands parse, the tables are complete."""

import re
from pathlib import Path

import pytest

from search_r1.rewards import LLM_JUDGE, REWARDS, RewardInput, build_reward
from search_r1.scoring_options import JUDGE, SCORES
from tests.verl.config.test_cli import compose

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "rewards.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "score", "components"),
    [
        ("<answer>Paris</answer>", 1.0, {"f1": 1.0, "excess_words": 0, "answered": 1.0}),
        (
            "<answer>Paris in France</answer>",
            0.5 - 0.1,
            {"f1": 0.5, "excess_words": 2, "answered": 1.0},
        ),
        ("Paris", 0.0, {"answered": 0.0}),
    ],
)
def test_the_documented_reward_runs(
    text: str, score: float, components: dict[str, float], tmp_path: Path
) -> None:
    """The page's example works as a file named in `reward_model.name`."""
    code = next(c for c in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "def brief" in c)
    (tmp_path / "brief.py").write_text(code)
    out = build_reward(f"{tmp_path}/brief.py:brief")(
        RewardInput([text], [("policy", text)], ["Paris"])
    )
    assert out.score == pytest.approx(score)
    assert out.components == pytest.approx(components)


def test_the_documented_stages_parse() -> None:
    """Both documented ways to end a stage are valid options."""
    (both,) = re.findall(r"'(reward_model\.stages=[^']*)'", PAGE)
    first = compose(both).reward_model.stages[0]
    assert first.until_step == 100
    plateau = first.plateau
    assert plateau is not None and (plateau.patience, plateau.min_delta) == (10, 0.01)


def test_every_reward_and_option_is_documented() -> None:
    """The page has every reward, every option, and every component with its rewards."""
    for name in [*REWARDS, LLM_JUDGE]:
        assert f"| `{name}`" in PAGE
    for name in [*SCORES, *JUDGE]:
        assert re.search(rf"[`.]{name}[`=]", PAGE), name
    dialogue = RewardInput(["<answer>a</answer>"], [], ["a"])
    table = PAGE.split("| component | logged by |")[1].split("\n\n")[0]
    rows = dict(re.findall(r"^\| (`.*?) \| (.*?) \|$", table, re.MULTILINE))
    for name in REWARDS:
        for component in build_reward(name)(dialogue).components:
            (loggers,) = [v for k, v in rows.items() if f"`{component}`" in k.split(":")[0]]
            known = f"`{name}`" in loggers or "all built-in rewards" in loggers
            assert known or ("the stages" in loggers and "stage" in name), (name, component)
