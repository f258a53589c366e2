"""The arms' scores by question: added from evaluations, compared, drawn."""

import copy
from pathlib import Path

import pandas as pd
import pytest

from example.smollm2 import arms
from search_r1.evaluation.store import Store
from search_r1.evaluation.summary import NUM_RESAMPLES
from tests.evaluation.scripted import sample, search
from tests.evaluation.test_tables import MANIFEST
from verl.errors import DataError

EM = {"A": [1, 0, 1, 1], "B": [0, 0, 1, 0]}


def evaluation(folder: Path, ems: list[int], n: int = 1) -> Path:
    """Write a finished evaluation of the rows 7, 8, …, in the order in which they ended."""
    manifest = copy.deepcopy(MANIFEST)
    manifest["data"]["num_rows"], manifest["decoding"]["n"] = len(ems), n
    with Store(folder, manifest) as store:
        for number, em in reversed([*enumerate(ems, 7)]):
            searches = (search("q", has_answer=bool(em)),) * number
            for again in range(n):
                store.append(sample(f"dev.parquet#{number}", float(em), f1=1 / 3, number=again,
                                    searches=searches))  # fmt: skip
    return folder


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A file with the arm A alone."""
    path = tmp_path / "dev.csv"
    pd.DataFrame({"row": range(7, 11), "data_source": "nq", "em_A": EM["A"]}).to_csv(
        path, index=False
    )
    return path


def test_an_evaluation_adds_its_columns(tmp_path: Path, table: Path) -> None:
    """Each question's scores stand in its line; the arm can be added again."""
    words = [str(table), "--add", f"B={evaluation(tmp_path / 'b', EM['B'])}"]
    assert arms.main(words) == arms.main(words) == 0
    found = pd.read_csv(table)
    assert found["em_A"].to_list() == EM["A"] and found["em_B"].to_list() == EM["B"]
    assert found["searches_B"].to_list() == [7, 8, 9, 10]
    assert found["shown_B"].to_list() == EM["B"]
    assert found["f1_B"].to_list() == [pytest.approx(1 / 3, abs=1e-4)] * 4
    assert len(found.columns) == 7


def test_differences_are_paired_by_question(
    tmp_path: Path, table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Means are shares, a difference has the mean and bounds of its own differences."""
    arms.main([str(table), "--add", f"B={evaluation(tmp_path / 'b', EM['B'])}"])
    out = capsys.readouterr().out
    assert "| A | 75.0 [" in out and "| B | 25.0 [" in out
    found = arms.means(pd.DataFrame({"d": [1, 0, 0, 1]}), ["d"])["d"]
    assert found == (50.0, 0.0, 100.0)  # four questions: none or all of them can be drawn
    assert f"| A | – | +50.0 [{found[1]:+.1f}, {found[2]:+.1f}] |" in out
    assert NUM_RESAMPLES * 0.5**4 > 25 * 2.5, "so often that the ends are 0 and 100"


def test_the_mean_of_arms_is_compared_too(
    tmp_path: Path, table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By question; the file keeps the arms alone."""
    words = [str(table), "--add", f"B={evaluation(tmp_path / 'b', EM['B'])}", "--mean", "M=A,B"]
    arms.main(words)
    out = capsys.readouterr().out
    assert "| M | 50.0 [" in out and "| M | -25.0 [" in out
    assert "right by one arm: 75.0 %, by all: 25.0 %" in out
    assert "M" not in "".join(pd.read_csv(table).columns)


def test_seeds_are_drawn_as_questions_are() -> None:
    """Equal questions leave the seeds alone to chance: the binomial's ends, by counting."""
    table = pd.DataFrame({"A": [1, 1], "B": [0, 0], "C": [0, 0]})
    assert arms.over_seeds(table, ["A", "B"], ["C"]) == "+50.0 [+0.0, +100.0]"
    assert arms.over_seeds(table, ["C"], ["A", "B"]) == "-50.0 [-100.0, +0.0]"
    assert arms.over_seeds(table, ["A"], ["C"]) == "+100.0 [+100.0, +100.0]"
    assert arms.over_seeds(table.iloc[:1], ["A", "B"], ["A", "B"]) == "+0.0 [-100.0, +100.0]"


def test_two_means_are_compared_over_their_arms(
    table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One arm of four questions, three of them right: only the questions are drawn."""
    arms.main([str(table), "--mean", "M=A", "N=A"])
    assert "M minus N, over questions and arms: +0.0 [+0.0, +0.0]" in capsys.readouterr().out


@pytest.mark.parametrize("mean", ["M=A,X", "A=A", "M="])
def test_means_of_unknown_arms_are_refused(
    mean: str, table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And one that has the name of an arm, whose scores it would hide."""
    with pytest.raises(SystemExit):
        arms.main([str(table), "--mean", mean])
    assert f"got {mean}, expected" in capsys.readouterr().err


def test_other_questions_are_refused(tmp_path: Path, table: Path) -> None:
    """Nothing is written if a question is missing, or was asked several times."""
    before = table.read_bytes()
    with pytest.raises(DataError, match="the 4 rows of the file"):
        arms.main([str(table), "--add", f"B={evaluation(tmp_path / 'b', EM['B'][:3])}"])
    twice = evaluation(tmp_path / "twice", EM["B"], n=2)
    with pytest.raises(DataError, match="got 8 rows"):
        arms.main([str(table), "--add", f"B={twice}"])
    assert table.read_bytes() == before


def test_the_picture_has_every_arm(tmp_path: Path, table: Path) -> None:
    """The same scores give the same bytes."""
    pictures = [tmp_path / "1.svg", tmp_path / "2.svg"]
    for picture in pictures:
        arms.main([str(table), "--picture", str(picture)])
    texts = [picture.read_text() for picture in pictures]
    assert texts[0] == texts[1] and ">A<" in texts[0]
    arms.main([str(table), "--picture", str(pictures[0]), "--labels", "A=by reading = best"])
    assert ">by reading = best<" in pictures[0].read_text()
