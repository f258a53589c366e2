"""The seven question sets of the Search-R1 paper, where they are published, and their splits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from verl.errors import ConfigError, explain

HUB = "RUC-NLPIR/FlashRAG_datasets"
"""The FlashRAG collection on the Hugging Face hub; its configurations are named as the sets."""
TEST_SPLITS = ("test", "dev", "train")
"""The first of these that a set has is what it is tested on, as in the original scripts."""


@dataclass(frozen=True)
class QuestionSet:
    """One published set."""

    name: str
    title: str
    splits: tuple[str, ...]
    """What the collection has of it."""

    @property
    def test_split(self) -> str:
        """The split that becomes `test.parquet`."""
        return next(split for split in TEST_SPLITS if split in self.splits)

    def split_for(self, role: str) -> str:
        """The published split behind `train` or `test`. Raises ConfigError where there is none."""
        if role == "test":
            return self.test_split
        if role not in self.splits:
            got = f"{self.name}, which has {' and '.join(self.splits)} only"
            fix = "leave it out of --data_sources here; it is a test set"
            raise ConfigError(explain("--data_sources", got, f"sets with a {role} split", fix))
        return role


SETS = {
    one.name: one
    for one in (
        QuestionSet("nq", "Natural Questions", ("train", "dev", "test")),
        QuestionSet("triviaqa", "TriviaQA", ("train", "dev", "test")),
        QuestionSet("popqa", "PopQA", ("test",)),
        QuestionSet("hotpotqa", "HotpotQA", ("train", "dev")),
        QuestionSet("2wikimultihopqa", "2WikiMultiHopQA", ("train", "dev")),
        QuestionSet("musique", "MuSiQue", ("train", "dev")),
        QuestionSet("bamboogle", "Bamboogle", ("test",)),
    )
}


def find_sets(names: Sequence[str]) -> list[QuestionSet]:
    """The sets of `--data_sources`, in that order. Raises ConfigError for a wrong name or twice."""
    for name in names:
        if name not in SETS:
            fix = "correct it; a set of your own is built by own_questions.py (docs/data.md)"
            expected = f"names among {', '.join(SETS)}"
            raise ConfigError(explain("--data_sources", repr(name), expected, fix))
        if list(names).count(name) > 1:
            got = f"{name} {list(names).count(name)} times"
            raise ConfigError(explain("--data_sources", got, "each set once", "drop the others"))
    return [SETS[name] for name in names]
