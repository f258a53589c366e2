"""Tables of several evaluations: settings, search utility, refused comparisons."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from search_r1.evaluation import report
from search_r1.evaluation.__main__ import main
from search_r1.evaluation.measures import titles
from search_r1.evaluation.options import TableOptions
from search_r1.evaluation.published import SETS
from search_r1.evaluation.report import as_markdown, read_all
from search_r1.evaluation.store import Store
from search_r1.evaluation.summary import summarize
from tests.evaluation.scripted import sample, search
from verl.errors import ConfigError

CORPUS = {"count": 100, "size": 5, "digest": "abc"}
MANIFEST: dict[str, Any] = {
    "model": {"name": "m", "sha256": "0123456789abcdef"},
    "data": {"files": {"dev.jsonl": "d" * 64}, "num_rows": 4},
    "retriever": {"retriever": "bm25", "corpus": CORPUS},
    "method": "agent",
    "template": {"name": "short", "sha256": "t"},
    "decoding": {"temperature": 0.0, "n": 1, "seed": 0, "topk": 3, "max_turns": 2},
}


def evaluation(folder: Path, ems: list[float], start: int = 0, **changes: Any) -> Path:
    """Write a finished evaluation of four questions, the first of them row `start`."""
    with Store(folder, copy.deepcopy(MANIFEST) | changes) as store:
        for i, em in enumerate(ems, start):
            row = sample(f"dev.jsonl#{i}", em, question=f"Who is {i}?", searches=(search("q"),))
            store.append(row)
    return folder


def table(folders: list[Path], *, is_mixed: bool = False, **options: Any) -> str:
    """Return the table of evaluations in folders."""
    return report.table(read_all(folders, is_mixed=is_mixed), **options)


def test_the_table_names_model_and_corpus(tmp_path: Path) -> None:
    """Each row has the evaluation's settings, and each value its interval."""
    real = evaluation(tmp_path / "real", [1, 1, 1, 0])
    direct = evaluation(tmp_path / "direct", [0, 0, 1, 0], method="direct",
                        retriever={"retriever": "none"})  # fmt: skip
    found = table([real, direct], num_resamples=200)
    what = "agent | bm25 over 100 documents (abc) | short | greedy, max_turns 2, topk 3 |"
    assert f"| real | m (0123456789ab) | {what}" in found
    assert "| direct | m (0123456789ab) | direct | none |" in found
    assert "| real | 75.0 [" in found
    assert "Search utility" not in found


def test_replies_that_were_read_are_named(tmp_path: Path) -> None:
    """The table shows which evaluations read untagged replies."""
    decoding = MANIFEST["decoding"] | {"untagged": "read"}
    strict = evaluation(tmp_path / "strict", [0.0] * 4)
    lenient = evaluation(tmp_path / "lenient", [0.0] * 4, decoding=decoding)
    found = table([strict, lenient], num_resamples=100)
    assert found.count("topk 3, untagged replies read |") == 1


def test_other_lengths_of_a_pair_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tables and pairs say what else differs; equal settings add nothing."""
    folders = [evaluation(tmp_path / name, [1, 0, 1, 0],
                          decoding=MANIFEST["decoding"] | {"max_obs_length": length})
               for name, length in (("a", 448), ("b", 448), ("c", 560))]  # fmt: skip
    expected = "a and c also differ in decoding.max_obs_length: 448 against 560"
    assert table(folders, num_resamples=100).count("also differ") == 1
    assert expected in table(folders, num_resamples=100)
    assert main(["compare", str(folders[0]), str(folders[2]), "--num-resamples", "100"]) == 0
    assert expected in capsys.readouterr().out
    assert "also differ" not in table(folders[:2], num_resamples=100)


def test_the_rule_of_normalisation_is_named_and_not_mixed(tmp_path: Path) -> None:
    """Reports count what the rules judge differently; tables refuse figures of two rules."""
    folders = [tmp_path / "squad", tmp_path / "unicode"]
    for folder in folders:
        decoding = MANIFEST["decoding"] | {"normalize": folder.name}
        with Store(folder, copy.deepcopy(MANIFEST) | {"decoding": decoding}) as store:
            for i, answer in enumerate(("Bogota\u0301", "Bogot\u00e1", "Lima", None)):
                truth = replace(sample(f"dev.jsonl#{i}", 0.0), ground_truth=("Bogot\u00e1",))
                store.append(replace(truth, answer=answer))
        assert main(["report", str(folder), "--num-resamples", "100"]) == 0
        assert json.loads((folder / "metrics.json").read_text())["judged_differently"] == 1
        assert f"normalize={folder.name}; 1 of 4 rows" in (folder / "report.md").read_text()
    with pytest.raises(ConfigError, match="squad: squad; unicode: unicode"):
        table(folders)
    found = table(folders, is_mixed=True, num_resamples=100)
    assert found.count("topk 3, normalize unicode |") == 1


def test_folders_of_one_name_are_told_apart(tmp_path: Path) -> None:
    """Evaluations with the same folder name are shown with their paths."""
    folders = [evaluation(tmp_path / run / "dev", ems) for run, ems in
               (("one", [1.0] * 4), ("two", [0.0] * 4))]  # fmt: skip
    found = table(folders, num_resamples=100)
    assert f"| {folders[0]} | 100.0 [" in found
    assert f"| {folders[1]} | 0.0 [" in found


def test_search_utility_is_paired(tmp_path: Path) -> None:
    """Search utility compares evaluations that differ only in the retriever."""
    real = evaluation(tmp_path / "real", [1, 1, 1, 0])
    empty = evaluation(tmp_path / "empty", [0, 1, 0, 0], retriever={"retriever": "empty"})
    random = evaluation(tmp_path / "random", [0, 1, 0, 1],
                        retriever={"retriever": "random", "corpus": CORPUS})  # fmt: skip
    other = evaluation(tmp_path / "other", [0] * 4, retriever={"retriever": "empty"},
                       template={"name": "search_r1", "sha256": "u"})  # fmt: skip
    found = table([real, empty, random, other], num_resamples=400)
    assert "| real − empty | nq | +50.0 | [+0.0, +100.0] |" in found
    assert "| real − random | nq | +25.0 |" in found
    assert "real − other" not in found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"files": {"dev.jsonl": "e" * 64}, "num_rows": 4}}, r"data\.files\.dev\.jsonl"),
        ({"data": {"files": {"dev.jsonl": "d" * 64}, "num_rows": 4, "chosen": 4}}, "chosen"),
        ({"retriever": {"retriever": "e5", "corpus": CORPUS | {"digest": "x"}}}, "one corpus"),
        ({"retriever": {"retriever": "unknown", "address": "http://h"}}, "one corpus"),
    ],
)
def test_unequal_things_are_not_mixed_silently(
    tmp_path: Path, changes: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Different rows or corpora are refused with the differences, unless mixed is allowed."""
    folders = [evaluation(tmp_path / "a", [1] * 4), evaluation(tmp_path / "b", [0] * 4, **changes)]
    with pytest.raises(ConfigError, match=message):
        table(folders)
    assert "| b | 0.0 [" in table(folders, is_mixed=True, num_resamples=200)
    assert main(["compare", *map(str, folders)]) == 2
    assert "--mixed" in capsys.readouterr().err


def test_another_seed_asks_the_same_questions(tmp_path: Path) -> None:
    """Evaluations with other seeds, of all or of the same number of rows, are one table."""
    other = {"decoding": MANIFEST["decoding"] | {"seed": 1}}
    some = {"data": MANIFEST["data"] | {"chosen": 4}}
    table([evaluation(tmp_path / "a", [1] * 4), evaluation(tmp_path / "b", [1] * 4, **other)])
    table([evaluation(tmp_path / "c", [1] * 4, **some),
           evaluation(tmp_path / "d", [1] * 4, **some, **other)])  # fmt: skip


def test_other_rows_of_the_same_files_are_refused(tmp_path: Path) -> None:
    """As those that an earlier version chose by its seed: the manifests do not tell them apart."""
    some = {"data": MANIFEST["data"] | {"chosen": 4}}
    folders = [evaluation(tmp_path / str(start), [1] * 4, start, **some) for start in (0, 1)]
    with pytest.raises(ConfigError, match="other rows"):
        table(folders)
    table(folders, is_mixed=True)


def test_compare_prints_the_paired_test(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table has the values, difference, discordant questions and McNemar's p."""
    first = evaluation(tmp_path / "first", [1, 1, 1, 0])
    second = evaluation(tmp_path / "second", [0, 0, 1, 0])
    assert main(["compare", str(first), str(second), "--num-resamples", "200"]) == 0
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("| nq"))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[:5] == ["nq", "4", "75.0", "25.0", "+50.0"]
    assert cells[7:] == ["2", "0", "0.5"]


def test_a_report_can_be_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A report can be made from manifest and samples with other bootstrap settings."""
    folder = evaluation(tmp_path / "a", [1, 1, 1, 0])
    assert main(["report", str(folder), "--num-resamples", "300"]) == 0
    assert "| EM | 75.0 [" in capsys.readouterr().out
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["estimates"]["nq"]["em"]["value"] == 0.75


def test_undefined_figures_are_dashes_or_left_out() -> None:
    """A measure that is undefined everywhere has no row; one undefined in a set has a dash."""
    samples = [sample("a#0", 1.0, source="a"), sample("b#0", 0.0, source="b")]
    found = as_markdown(MANIFEST, summarize(samples, num_resamples=100))
    assert "judge" not in found
    row = next(x for x in found.splitlines() if x.startswith("| policy tokens per correct"))
    assert [cell.strip() for cell in row.strip("|").split("|")][1:3] == [
        "20.00 [20.00, 20.00]",
        "–",
    ]


def test_a_k_beyond_the_samples_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A k above the number of samples is refused."""
    folder = evaluation(tmp_path / "a", [1, 1, 1, 0])
    assert main(["report", str(folder), "--pass-k", "1", "8"]) == 2
    assert capsys.readouterr().err.startswith("--pass-k: got (1, 8), expected 1 to n=1")


def test_counts_are_compared_as_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Searches are no shares, and what is undefined is a dash."""
    first = evaluation(tmp_path / "first", [1, 1, 1, 0])
    second = evaluation(tmp_path / "second", [0, 0, 1, 0])
    words = ["compare", str(first), str(second), "--num-resamples", "200", "--measure"]
    assert main([*words, "searches"]) == 0
    said = capsys.readouterr().out
    assert "searches, first minus second:\n" in said
    assert "| nq | 4 | 1.00 | 1.00 | +0.00 | [+0.00, +0.00] |" in said
    assert main([*words, "judge"]) == 0
    assert "| nq | 4 | – | – | – | – |" in capsys.readouterr().out


def test_evaluations_stand_beside_the_papers_figures(tmp_path: Path) -> None:
    """A set's EM stands in the paper's column; the average needs all seven sets."""
    one = evaluation(tmp_path / "one", [1, 0, 0, 1])
    seven = tmp_path / "seven"
    data = MANIFEST["data"] | {"num_rows": len(SETS)}
    with Store(seven, copy.deepcopy(MANIFEST) | {"data": data}) as store:
        for i, name in enumerate(SETS):
            store.append(sample(f"dev.jsonl#{i}", float(i < 3), source=name))
    found = table([one, seven], num_resamples=100, paper="3B", is_mixed=True)
    assert "| Search-R1, instruct | 0.341 | 0.545 |" in found
    assert f"| **one** | 0.500 |{' – |' * 7}" in found
    assert "none of the paper's sets" not in found
    assert "| **seven** | 1.000 | 1.000 | 1.000 | 0.000 | 0.000 | 0.000 | 0.000 | 0.429 |" in found


def test_evaluations_stand_below_the_papers_row(tmp_path: Path) -> None:
    """An evaluation follows the row of its method, or the row that its folder is named after."""
    methods = {"mine": "agent", "steps": "cot", "sft": "direct", "rejection_sampling": "agent"}
    folders = [evaluation(tmp_path / n, [1.0] * 4, method=m) for n, m in methods.items()]
    lines = table(folders, num_resamples=100, paper="7B").splitlines()
    above = {n: lines[lines.index(f"| **{n}** | 1.000 |{' – |' * 7}") - 1] for n in methods}
    assert {n: line.split(" | ")[0] for n, line in above.items()} == {
        "mine": "| Search-R1, instruct", "steps": "| chain of thought", "sft": "| SFT",
        "rejection_sampling": "| rejection sampling",
    }  # fmt: skip


def test_a_table_has_the_costs_of_a_question(tmp_path: Path) -> None:
    """Means over all rows; seconds are unknown for evaluations that did not measure them."""
    old = evaluation(tmp_path / "old", [1.0, 0.0, 0.0, 1.0])
    data = MANIFEST["data"] | {"num_rows": 2}
    with Store(tmp_path / "new", copy.deepcopy(MANIFEST) | {"data": data}) as store:
        store.append(sample("dev.jsonl#0", 0.0, seconds=0.5))
        store.append(sample("dev.jsonl#1", 0.0, seconds=1.5, prompt_tokens=20, policy_tokens=4))
    found = table([old, tmp_path / "new"], num_resamples=100, is_mixed=True)
    names = ["EM", *map(titles().__getitem__, report.COSTS)]
    assert f"|  | {' | '.join(names)} |" in found
    assert "| old | 50.0 | 1.00 | 2.00 | 60.00 | 20.00 | – | 2.00 | 40.00 |" in found
    assert "| new | 0.0 | 0.00 | 2.00 | 57.00 | 12.00 | 1.00 | – | – |" in found


def test_a_row_of_dashes_beside_the_paper_is_explained(tmp_path: Path) -> None:
    """An evaluation of other sets says which it has, and what the paper's are called."""
    own, data = tmp_path / "own", MANIFEST["data"] | {"num_rows": 1}
    with Store(own, copy.deepcopy(MANIFEST) | {"data": data}) as store:
        store.append(sample("dev.jsonl#0", 1.0, source="geography"))
    found = table([own], num_resamples=100, paper="3B")
    assert "own has questions of geography and of none of the paper's sets" in found


def test_only_em_stands_beside_the_paper(tmp_path: Path) -> None:
    """The paper reports no other measure."""
    with pytest.raises(ConfigError, match="--paper"):
        TableOptions(folders=(tmp_path,), measure="f1", paper="7B")


def audited(path: Path, kinds: list[str]) -> Path:
    """Write a question file with a column, for the questions of `evaluation`."""
    rows = [
        {"prompt": "p", "data_source": "nq", "reward_model": {"ground_truth": "a"},
         "question": f"Who is {i}?", "kind": kind}
        for i, kind in enumerate(kinds)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_questions_are_grouped_by_a_column(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sets give way to the values of the column, and all rows are as before."""
    one = evaluation(tmp_path / "one", [1, 1, 1, 0])
    file = audited(tmp_path / "audited.jsonl", ["span", "span", "yes_no", "yes_no"])
    assert main(["table", str(one), "--by", "kind", "--by-data", str(file)]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert rows[-6].split(" | ")[1:3] == ["kind=span", "kind=yes_no"]  # costs follow
    assert [cell.split()[0] for cell in rows[-4].split(" | ")[1:]] == [
        "100.0",
        "50.0",
        "75.0",
        "75.0",
    ]
    assert main(["compare", str(one), str(one), "--by", "kind", "--by-data", str(file)]) == 0
    assert "| kind=yes_no | 2 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kinds", "column"), [(["span"] * 3, "kind"), (["span"] * 4, "level")], ids=["row", "column"]
)
def test_a_question_without_a_value_is_refused(
    tmp_path: Path, kinds: list[str], column: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each question needs a row with the column, so that none is left out in silence."""
    one = evaluation(tmp_path / "one", [1, 1, 1, 0])
    file = audited(tmp_path / "audited.jsonl", kinds)
    assert main(["table", str(one), "--by", column, "--by-data", str(file)]) == 2
    assert "--by" in capsys.readouterr().err
