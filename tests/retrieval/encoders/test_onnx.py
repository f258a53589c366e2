"""Encoders in ONNX files, against sentence-transformers over the same folder."""

import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx", reason="pip install '.[onnx]'")
pytest.importorskip("onnxruntime", reason="pip install '.[onnx]'")

from search_r1.retrieval.encoder import open_encoder
from search_r1.retrieval.encoders.onnx_export import export
from search_r1.retrieval.engines.registry import build_retriever
from search_r1.retrieval.errors import SetupError
from search_r1.retrieval.index_builder import BuildConfig, build_index
from search_r1.retrieval.settings import EncoderConfig, RetrieverConfig

TEXTS = ["who is the capital of france", "river", "what is a city , a river .", "", "a " * 60]
MEAN, CLS = {"pooling_mode_mean_tokens": True}, {"pooling_mode_cls_token": True}
FILE, INT8 = "onnx/model.onnx", "onnx/model_int8.onnx"
Make = Callable[..., Any]


def both(folder: str, file: str = FILE, **options: Any) -> Any:
    """Open the folder's encoder by sentence-transformers, and from its file, in batches of two."""
    config = EncoderConfig(folder, encoder_batch_size=2, **options)
    return open_encoder(config), open_encoder(replace(config, retriever_model=f"{folder}/{file}"))


@pytest.mark.parametrize(
    ("name", "pooling", "kinds", "prompts"),
    [
        ("other", MEAN, ("Pooling", "Normalize"), {}),
        ("e5-tiny", MEAN, ("Pooling",), {}),
        ("other", CLS, ("Pooling", "Normalize"), {"query": "a city ", "passage": "river "}),
        ("contriever", None, (), {}),
    ],
)
def test_vectors_and_what_is_said_of_them(
    make_model: Make, declare: Make, name: str, pooling: Any, kinds: Any, prompts: Any
) -> None:
    """Float32 computes the same, cuts as many texts, and says what a run depends on."""
    folder = make_model(name)
    if kinds:
        declare(folder, pooling, *kinds, **prompts)
    export(Path(folder))
    reference, encoder = both(folder, query_max_length=16)
    for encode in ("encode_queries", "encode_passages"):
        expected = getattr(reference, encode)(TEXTS)
        assert getattr(encoder, encode)(TEXTS) == pytest.approx(expected, abs=1e-5)
    assert encoder.encode_queries([]).shape == (0, 32)
    assert [(c.limit, c.num_cut) for c in encoder.cuts] == [
        (c.limit, c.num_cut) for c in reference.cuts
    ]
    its_own = {"dtype", "weights"}
    assert {k: v for k, v in encoder.info().items() if k not in its_own} == {
        k: v for k, v in reference.info().items() if k not in its_own
    }


def test_int8_is_near_and_another_encoder(make_model: Make, declare: Make) -> None:
    """Caches and records keep the precisions apart; --query_model mixes them."""
    folder = make_model("tiny")
    declare(folder, MEAN, "Pooling", "Normalize")
    export(Path(folder))
    _, exact = both(folder)
    reference, coarse = both(folder, INT8)
    ours, theirs = coarse.encode_passages(TEXTS), reference.encode_passages(TEXTS)
    assert (ours * theirs).sum(axis=1).min() > 0.97 and not np.array_equal(ours, theirs)
    assert coarse.info()["weights"] != exact.info()["weights"]
    mixed = open_encoder(EncoderConfig(f"{folder}/{FILE}", query_model=f"{folder}/{INT8}"))
    assert np.array_equal(mixed.encode_passages(TEXTS[:1]), exact.encode_passages(TEXTS[:1]))
    assert np.array_equal(mixed.encode_queries(TEXTS[:1]), coarse.encode_queries(TEXTS[:1]))


@pytest.mark.parametrize(
    ("options", "damage", "key"),
    [
        ({"encoder_dtype": "bfloat16"}, None, "encoder_dtype"),
        ({"encoder_device": "cuda"}, None, "encoder_device"),
        ({"pooling_method": "cls"}, None, "retriever_model"),
        ({}, "onnx/model.onnx", "retriever_model"),
        ({}, "tokenizer.json", "retriever_model"),
        ({}, "modules.json", "retriever_model"),
    ],
)
def test_what_a_file_cannot_do_is_refused(
    make_model: Make, declare: Make, options: Any, damage: str | None, key: str
) -> None:
    """Before anything is searched, by the option's name."""
    folder = make_model("tiny")
    declare(folder, MEAN, "Pooling")
    export(Path(folder))
    if damage:
        (Path(folder) / damage).write_text("[1]")
    with pytest.raises(SetupError, match=key):
        open_encoder(EncoderConfig(f"{folder}/{FILE}", **options))


def test_an_index_is_the_folders_too(make_model: Make, declare: Make, tmp_path: Path) -> None:
    """What a file built, the folder serves, and the other way round."""
    pytest.importorskip("faiss")
    folder, path = make_model("tiny"), tmp_path / "corpus.jsonl"
    declare(folder, MEAN, "Pooling", "Normalize")
    export(Path(folder))
    path.write_text("\n".join(json.dumps({"id": t, "contents": t}) for t in TEXTS if t))
    models, found = [folder, f"{folder}/{FILE}"], []
    for builder, server in itertools.product(models, models):
        name = f"by{models.index(builder)}"
        index = str(build_index(BuildConfig(name, str(path), str(tmp_path), builder)))
        config = RetrieverConfig(name, str(path), index, encoder=EncoderConfig(server))
        hits = build_retriever(config).search(["river", "the capital of france"], 3)
        found.append([[hit.document.id for hit in some] for some in hits])
    assert found == found[:1] * 4


def test_it_needs_neither_torch_nor_transformers(make_model: Make, declare: Make) -> None:
    """Their imports are most of a dense server's start."""
    folder = make_model("tiny")
    declare(folder, MEAN, "Pooling")
    export(Path(folder))
    program = (
        "import sys; from search_r1.retrieval.encoder import open_encoder\n"
        "from search_r1.retrieval.settings import EncoderConfig\n"
        f"open_encoder(EncoderConfig({f'{folder}/{FILE}'!r})).encode_queries(['a'])\n"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
