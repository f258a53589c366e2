"""The training data of the tiny policy: invented worlds, dialogues, and the tokenizer."""

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
    """Return a generator of names like those of the training half."""
    return Names(city.name for city in training_world().cities)


@pytest.fixture(scope="module")
def world_dialogues(names: Names) -> list[Dialogue]:
    """Return the dialogues about one invented world."""
    return list(dialogues(invented_world(names, random.Random(0)), seed=0))


def test_invented_worlds_depend_on_the_seed_alone_and_repeat_no_name(names: Names) -> None:
    """Equal seeds give equal worlds, and each city has a unique name."""
    first, again = (invented_world(names, random.Random(3)) for _ in range(2))
    assert first == again
    assert len({city.name for city in first.cities}) == len(first.cities)


def test_dialogues_search_too_little(world_dialogues: list[Dialogue]) -> None:
    """About the configured fractions of the dialogues make all searches, so RL can improve."""
    for hops, share in ((2, TWO_HOP_SHARE), (1, COUNTRY_SHARE)):
        with_hops = [
            dialogue
            for dialogue in world_dialogues
            if len(dialogue.question.plan) == hops and dialogue.question.fact is not None
        ]
        thorough = sum(len(d.segments) == 2 * hops + 1 for d in with_hops) / len(with_hops)
        assert thorough == pytest.approx(share, abs=0.06)


def test_the_tokenizer_keeps_texts_tags_and_digits(
    world_dialogues: list[Dialogue],
) -> None:
    """A tag is one token, and so are two digits; texts are decoded unchanged."""
    tokenizer = train_tokenizer(world_dialogues)
    for _, text in world_dialogues[0].segments:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("</answer>")) == 1
    assert tokenizer.tokenize("90705") == ["90", "70", "5"]
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Who?"}], tokenize=False, add_generation_prompt=True
    )
    assert ids == "Who?\n"
