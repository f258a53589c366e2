"""Cutting: no word lost, no passage over the limit, ends of sentences first, overlap as asked."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from search_r1.datasets.texts.cutting import Cutter, choose, tokens, words
from search_r1.retrieval.errors import SetupError

TEXT = st.text(alphabet=st.sampled_from("ab. !?\n\t#é日本。」"), max_size=300)


@pytest.fixture(scope="module")
def bytes_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer that cuts inputs to four tokens, as encoders' files do."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=280, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(["ab ab. abab"] * 9, trainer)
    tokenizer.enable_truncation(4)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@given(text=TEXT, size=st.integers(1, 12), by_tokens=st.booleans())
def test_nothing_is_lost_within_the_limit(
    bytes_path: Path, text: str, size: int, by_tokens: bool
) -> None:
    """Without overlap the passages have all characters in order, at most `size` units each."""
    units = tokens(str(bytes_path.parent)) if by_tokens else words
    passages = Cutter(size, 0, units).cut(text)
    assert "".join("".join(passages).split()) == "".join(text.split())
    if not by_tokens:
        assert all(1 <= len(words(passage)) <= size for passage in passages)
        if text.isascii():
            assert [word for passage in passages for word in passage.split()] == text.split()


@given(
    words_at_once=st.lists(st.integers(1, 9), max_size=9),
    size=st.integers(2, 12),
    overlap=st.integers(0, 11),
    by_tokens=st.booleans(),
)
def test_an_overlap_repeats_the_end(
    bytes_path: Path, words_at_once: list[int], size: int, overlap: int, by_tokens: bool
) -> None:
    """Each passage begins at most so many units before the end of the one before."""
    units = tokens(str(bytes_path.parent)) if by_tokens else words
    size += 6 if by_tokens else 0  # a word has up to six tokens
    overlap = min(overlap, size - 1)
    numbers = iter(range(999))
    text = " ".join(" ".join(f"<{next(numbers)}>" for _ in range(n)) + "." for n in words_at_once)
    place = end = 0
    for passage in Cutter(size, overlap, units).cut(text):
        start = text.find(passage, place)
        repeated = text[start:end]
        assert place <= start <= end + 1 and end < start + len(passage)
        assert len(units(repeated)) <= overlap
        place, end = start + 1, start + len(passage)
    assert end == len(text)


def test_passages_of_tokens_hold_no_more(bytes_path: Path) -> None:
    """Whole words are kept together, and the truncation of the file does not count."""
    units = tokens(str(bytes_path))
    text = "abab ab ab. ab " * 40
    passages = Cutter(12, 0, units).cut(text)
    assert max(len(units(passage)) for passage in passages) <= 12
    assert " ".join(passages).split() == text.split() and len(passages) > 10
    assert Cutter(1, 0, units).cut("日日") == ["日", "日"]


@pytest.mark.parametrize(
    ("size", "overlap", "expected"),
    [
        (5, 0, ["One two three. Four five!", "Six seven Eight nine.",
                "x x x x x", "x x x x x", "x x"]),
        (5, 2, ["One two three. Four five!", "Four five! Six seven", "Six seven Eight nine.",
                "Eight nine. x x x", "x x x x x", "x x x x x", "x x x x x"]),
    ],
)  # fmt: skip
def test_sentences_stay_whole(size: int, overlap: int, expected: list[str]) -> None:
    """Passages take whole sentences while they fit; an overlap begins with a sentence or a word."""
    text = "One two three. Four five! Six\nseven\n\nEight nine. " + "x " * 12
    assert Cutter(size, overlap).cut(text) == expected


@pytest.mark.parametrize(
    ("text", "size", "overlap", "expected"),
    [
        ("他说：“好。”她走了。天黑了", 3, 0, ["他说：“好。”", "她走了。", "天黑了"]),
        ("中文 " + "长" * 12 + "。完", 3, 0, ["中文 长长长长", "长" * 6, "长长。完"]),
        ("人口1990万。面积大。", 4, 2, ["人口1990万。", "万。面积大。"]),
        ("한국의 수도는 서울", 2, 0, ["한국의 수도는", "서울"]),
    ],
)
def test_texts_without_spaces(text: str, size: int, overlap: int, expected: list[str]) -> None:
    """Two characters count as a word; a full stop ends a sentence, with the quotation mark."""
    assert Cutter(size, overlap).cut(text) == expected


def test_a_page_of_chinese_is_cut(bytes_path: Path) -> None:
    """13,200 characters are 60 passages of 198 and their punctuation, or one for 99 tokens each."""
    page = "长江全长六千三百公里，是亚洲的第一长河。" * 660
    assert [len(passage) for passage in Cutter(100).cut(page)] == [220] * 60
    assert {len(passage) for passage in Cutter(99, 0, tokens(str(bytes_path))).cut(page)} == {20}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ((9, None, None, 9), "--chunk_overlap"),
        ((9, 9, None), "--tokenizer"),
        ((9, None, "x"), "--chunk_size"),
        ((9, 9, "/nowhere"), "--tokenizer"),
        ((9, 9, __file__), "--tokenizer"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: tuple[object, ...], named: str) -> None:
    with pytest.raises(SetupError, match=f"^{named}: got"):
        choose(*options)  # type: ignore[arg-type]
