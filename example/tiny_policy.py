"""Make a tiny policy, pretrained on dialogues: `python -m example.tiny_policy --out DIR`.

A Llama with less than a million parameters and its own tokenizer is trained from scratch on
dialogues about invented entities and about the example's training half. It can write the tags and
copy names into queries and numbers out of passages, but searches too rarely, as the demonstrations
do. Reinforcement learning that takes minutes with a real model takes seconds with this one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from example.geography import (
    City,
    Country,
    Dialogue,
    Fact,
    Question,
    World,
    build_dialogue,
    build_questions,
    training_world,
)
from example.tiny import tiny_llama

ROOT = Path(__file__).resolve().parent.parent
VOCAB_SIZE = 1024
END = "<|end|>"
TAGS = ("think", "search", "information", "answer")
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
NUM_WORLDS = 24
THOROUGH_WORLDS = 15  # the first worlds, whose dialogues make all searches; the others also guess
NUM_REPETITIONS = 12000  # lists to copy, mixed with the dialogues of the thorough worlds
COUNTRIES_PER_WORLD = 100
CITIES_PER_COUNTRY = 12
HIDDEN_SIZE = 128
NUM_LAYERS = 4

# Fractions of the dialogues that make all searches; the others guess instead of the last one.
CITY_SHARE, COUNTRY_SHARE, TWO_HOP_SHARE = 0.9, 0.4, 0.3
BATCH_SIZE = 32
SFT_OPTIONS = (f"batch_size={BATCH_SIZE}", "lr=2e-3", "warmup_steps=100", "schedule=linear",
               "shuffle=false", "device=cpu", "compute_dtype=float32", "save_dtype=float32",
               "max_tokens_per_micro_batch=16384", "save_freq=250")  # fmt: skip
# For a machine with other load: no spinning threads.
SFT_ENVIRONMENT = {"OMP_THREAD_LIMIT": "1"}


class Names:
    """Generates names in the style of given ones: each letter depends on the two before it."""

    def __init__(self, names: Iterable[str]) -> None:
        self._next: dict[str, Counter[str]] = defaultdict(Counter)
        for name in names:
            padded = f"^^{name.lower()}$"
            for i in range(2, len(padded)):
                self._next[padded[i - 2 : i]][padded[i]] += 1

    def draw(self, rng: random.Random) -> str:
        """Return a capitalised word of 4 to 12 letters."""
        while True:
            letters = "^^"
            while not letters.endswith("$"):
                counts = self._next[letters[-2:]]
                letters += rng.choices(list(counts), list(counts.values()))[0]
            if 4 <= len(letters) - 3 <= 12:
                return letters[2:-1].capitalize()


def invented_world(names: Names, rng: random.Random) -> World:
    """Return a world like the real one with invented names and numbers."""
    taken: set[str] = set()

    def new_name() -> str:
        while (name := names.draw(rng)) in taken:
            pass
        taken.add(name)
        return name

    countries = [_invented_country(new_name, rng) for _ in range(COUNTRIES_PER_WORLD)]
    cities = [
        City(new_name(), _number(rng, 5, 6), country)
        for country in countries
        for _ in range(CITIES_PER_COUNTRY)
    ]
    return World(tuple(countries), tuple(cities))


def _invented_country(new_name: Callable[[], str], rng: random.Random) -> Country:
    words = [new_name() for _ in range(rng.choices((1, 2, 3), (8, 3, 1))[0])]
    facts = {
        Fact.CALLING_CODE: str(_number(rng, 1, 3)),
        Fact.ISO_NUMBER: f"{rng.randrange(1000):03d}",
        Fact.AREA: str(_number(rng, 2, 6)),
        Fact.DENSITY: str(_number(rng, 1, 4)),
    }
    return Country(" ".join(words), facts)


def _number(rng: random.Random, low: int, high: int) -> int:
    """Return a random number with `low` to `high` digits."""
    num_digits = rng.randint(low, high)
    return rng.randrange(10 ** (num_digits - 1), 10**num_digits)


def dialogues(world: World, seed: int, is_thorough: bool = False) -> Iterator[Dialogue]:
    """Yield a dialogue for each question about a world, with the passages of its plan.

    If `is_thorough`, all dialogues make all searches, else the fraction `search_share` of them.
    """
    rng = random.Random(f"tiny-dialogues-{seed}")
    for question in build_questions(world, seed):
        makes_all = is_thorough or rng.random() < search_share(question)
        num_searches = len(question.plan) if makes_all else len(question.plan) - 1
        yield build_dialogue(question, num_searches, rng)


def repetitions(names: Names, rng: random.Random) -> Iterator[Dialogue]:
    """Yield lists of names and numbers to repeat, which teach copying fastest."""
    for _ in range(NUM_REPETITIONS):
        items = [
            str(_number(rng, 1, 6)) if rng.random() < 0.7 else names.draw(rng)
            for _ in range(rng.randint(4, 12))
        ]
        text = ", ".join(items)
        question = Question(f"Repeat {text}.", (text,), (), subject=text)
        yield Dialogue(question, (("policy", f"<answer> {text} </answer>"),))


def search_share(question: Question) -> float:
    """Return the fraction of dialogues about this kind of question that make all searches."""
    if len(question.plan) > 1:
        return TWO_HOP_SHARE
    return CITY_SHARE if question.fact is None else COUNTRY_SHARE


def build_dialogues(seed: int) -> list[Dialogue]:
    """Return the training data in order: first searching and copying, then also guessing."""
    real = training_world()
    names = Names(city.name for city in real.cities)
    rng = random.Random(f"tiny-worlds-{seed}")
    worlds = [*(invented_world(names, rng) for _ in range(NUM_WORLDS - 1)), real]
    by_world = [
        list(dialogues(world, seed * 1000 + i, i < THOROUGH_WORLDS))
        for i, world in enumerate(worlds)
    ]
    first = [*itertools.chain(*by_world[:THOROUGH_WORLDS]), *repetitions(names, rng)]
    second = [*itertools.chain(*by_world[THOROUGH_WORLDS:])]
    rng.shuffle(first)
    rng.shuffle(second)
    return [*first, *second]


def train_tokenizer(demonstrations: Sequence[Dialogue]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on the dialogues, with one token per tag and per two digits.

    A model of this size copies by looking up what followed the previous token. Single digits, which
    occur several times in a number, would make that ambiguous.
    """
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Split(Regex(r"\d{1,2}"), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 2 * len(TAGS),
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = ("".join(text for _, text in d.segments) for d in demonstrations)
    prompts = (message["content"] for d in demonstrations for message in d.question.prompt)
    tokenizer.train_from_iterator((text for pair in (texts, prompts) for text in pair), trainer)
    tokenizer.add_tokens(
        [AddedToken(f"<{s}{t}>", normalized=False) for t in TAGS for s in ("", "/")]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def write_tiny_policy(out: Path, seed: int = 0) -> Path:
    """Train the policy and write it to a Hugging Face folder, atomically.

    After an interruption, the same call continues the training from its last checkpoint.
    """
    start = out.with_name(out.name + ".start")
    shutil.rmtree(start, ignore_errors=True)
    demonstrations = build_dialogues(seed)
    tokenizer = train_tokenizer(demonstrations[-4000:])
    model = tiny_llama(
        len(tokenizer),
        hidden_size=HIDDEN_SIZE,
        num_layers=NUM_LAYERS,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.02,
        seed=seed,
    )
    model.save_pretrained(start)
    tokenizer.save_pretrained(start)
    lines = (json.dumps(dialogue.record()) + "\n" for dialogue in demonstrations)
    (start / "dialogues.jsonl").write_text("".join(lines), encoding="utf-8")
    command = [sys.executable, "-m", "verl.trainer.sft", f"model_path={start}"]
    command += [f"train_file={start / 'dialogues.jsonl'}", f"output_dir={out}"]
    command += [f"steps={len(demonstrations) // BATCH_SIZE}", *SFT_OPTIONS]
    environment = {**os.environ, **SFT_ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, cwd=ROOT, env=environment)
    shutil.rmtree(start)
    shutil.rmtree(out.with_name(out.name + ".checkpoints"))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a tiny policy that searches too little.")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "tiny_policy")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write_tiny_policy(arguments.out.resolve(), arguments.seed)


if __name__ == "__main__":
    main()
