"""What the tiny policy reads: invented worlds, dialogues with their gap, a tokenizer of its own."""

import random

import pytest

from example.geography import Dialogue, training_world
from example.tiny_policy import (
    COUNTRY_SHARE,
    TWO_HOP_SHARE,
    Names,
    dialogues,
    invented_world,
    train_tokenizer,
)


@pytest.fixture(scope="module")
def names() -> Names:
    """Names like those of the training half."""
    return Names(city.name for city in training_world().cities)


@pytest.fixture(scope="module")
def found(names: Names) -> list[Dialogue]:
    """The dialogues about one invented world."""
    return list(dialogues(invented_world(names, random.Random(0)), seed=0))


def test_invented_worlds_depend_on_the_seed_alone_and_repeat_no_name(names: Names) -> None:
    """The policy can be rebuilt, and a name has one passage."""
    first, again = (invented_world(names, random.Random(3)) for _ in range(2))
    assert first == again
    assert len({city.name for city in first.cities}) == len(first.cities)


def test_dialogues_search_too_little(found: list[Dialogue]) -> None:
    """Reinforcement learning needs a gap to close: about the given shares search to the end."""
    for hops, share in ((2, TWO_HOP_SHARE), (1, COUNTRY_SHARE)):
        own = [d for d in found if len(d.question.plan) == hops and d.question.fact is not None]
        thorough = sum(len(d.segments) == 2 * hops + 1 for d in own) / len(own)
        assert thorough == pytest.approx(share, abs=0.06)


def test_the_tokenizer_keeps_texts_tags_and_pairs_of_digits(found: list[Dialogue]) -> None:
    """A tag is one token and a number one token for two digits, so that copying is easy."""
    tokenizer = train_tokenizer(found)
    for _, text in found[0].segments:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("</answer>")) == 1
    assert tokenizer.tokenize("90705") == ["90", "70", "5"]
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Who?"}], tokenize=False, add_generation_prompt=True
    )
    assert ids == "Who?\n"
