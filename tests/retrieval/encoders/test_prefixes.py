"""Prefixes of model folders whose name tells no family, and of the indexes built with them."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from search_r1.retrieval.encoder import open_encoder
from search_r1.retrieval.encoders.prefixes import check_prefixes, recognised
from search_r1.retrieval.engines.registry import build_retriever
from search_r1.retrieval.errors import IndexMismatch
from search_r1.retrieval.index_builder import BuildConfig, build_index
from search_r1.retrieval.manifest import Fingerprint, Manifest
from search_r1.retrieval.settings import EncoderConfig, RetrieverConfig

MakeModel = Callable[..., str]
Declare = Callable[..., None]
MEAN = {"pooling_mode_mean_tokens": True}
E5 = ("query: ", "passage: ")
BGE = "Represent this sentence for searching relevant passages: "
PLAIN = Manifest("e5", Fingerprint(1, 1, ""), 1)
BUILT_AS_E5 = replace(PLAIN, encoder="e5-base-v2", query_prefix=E5[0], passage_prefix=E5[1])


@pytest.fixture
def make_folder(make_model: MakeModel, declare: Declare) -> Callable[..., str]:
    """Return a function that saves a model with modules, prompts and a former name."""

    def make(name: str, former: str | None = None, **prompts: str) -> str:
        path = make_model(name)
        declare(path, MEAN, "Pooling", "Normalize", **prompts)
        if former is not None:
            file = Path(path) / "config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | {"_name_or_path": former}))
        return path

    return make


@pytest.mark.parametrize(
    ("former", "retriever_name", "manifest", "family"),
    [
        (None, "e5", None, "e5"),
        (None, "e5", BUILT_AS_E5, "e5"),
        (None, "e5", PLAIN, None),
        (None, "wiki", None, None),
        ("/cache/BAAI_bge-base-en/", "bge", None, "bge-en"),
        ("intfloat/e5-base-v2", "wiki", None, "e5"),
        ("tmp/", "e5", None, "e5"),
        (None, "contriever", PLAIN, None),
    ],
)
def test_a_renamed_folder_is_recognised(
    make_folder: MakeModel,
    former: str | None,
    retriever_name: str,
    manifest: Manifest | None,
    family: str | None,
) -> None:
    """The former name counts before the retriever's, and no guess contradicts a manifest."""
    config = EncoderConfig(make_folder("encoder", former))
    assert recognised(config, retriever_name, manifest).encoder_family == family


def test_names_of_models_and_choices_are_kept(make_folder: MakeModel) -> None:
    """A family's name, a hub name, a chosen family and the trial encoder are not second-guessed."""
    for config in (
        EncoderConfig(make_folder("bge-m3")),
        EncoderConfig("sentence-transformers/all-MiniLM-L6-v2"),
        EncoderConfig(make_folder("encoder"), encoder_family="other"),
        EncoderConfig("hash"),
    ):
        assert recognised(config, "e5") == config


def test_prefixes_unlike_those_of_the_index_are_refused(make_folder: MakeModel) -> None:
    """The fix names the family; a chosen family and declared prompts may differ."""
    renamed = EncoderConfig(make_folder("encoder"))
    with pytest.raises(IndexMismatch, match="--encoder_family e5 "):
        check_prefixes(open_encoder(renamed), renamed, BUILT_AS_E5, "index")
    own = replace(BUILT_AS_E5, query_prefix="q: ", encoder="trained")
    with pytest.raises(IndexMismatch, match="--retriever_model trained"):
        check_prefixes(open_encoder(renamed), renamed, own, "index")
    chosen = replace(renamed, encoder_family="other")
    check_prefixes(open_encoder(chosen), chosen, BUILT_AS_E5, "index")
    declares = EncoderConfig(make_folder("declares", query="ask: "))
    check_prefixes(open_encoder(declares), declares, BUILT_AS_E5, "index")
    named = EncoderConfig(make_folder("e5-tiny"))
    check_prefixes(open_encoder(named), named, PLAIN, "index")  # as of an early version


def test_a_warning_if_no_prefixes_are_known(
    make_folder: MakeModel, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning, and none for a choice, a known family, declared prompts or the trial encoder."""
    unknown = EncoderConfig(make_folder("encoder"))
    check_prefixes(open_encoder(unknown), unknown)
    assert len(caplog.records) == 1 and "--encoder_family" in caplog.text
    for config in (
        replace(unknown, encoder_family="other"),
        EncoderConfig(make_folder("e5-tiny")),
        EncoderConfig(make_folder("declares", query="ask: ")),
        EncoderConfig("hash"),
    ):
        check_prefixes(open_encoder(config), config)
    assert len(caplog.records) == 1


def test_an_index_is_served_with_the_prefixes_it_was_built_with(
    make_folder: MakeModel, corpus_path: Path, tmp_path: Path
) -> None:
    """A renamed e5 is built and served alike; a renamed bge-en needs the flag that is named."""

    def opened(name: str, **encoder: str) -> str:
        settings = EncoderConfig(str(tmp_path / name), **encoder)
        config = RetrieverConfig("bge", str(corpus_path), str(tmp_path / "i"), encoder=settings)
        info: dict[str, dict[str, str]] = build_retriever(config).info()  # type: ignore[attr-defined]
        return info["encoder"]["query_prefix"]

    encoder = make_folder("encoder")
    folder = build_index(BuildConfig("e5", str(corpus_path), str(tmp_path), model_path=encoder))
    manifest = Manifest.load(folder)
    assert (manifest.query_prefix, manifest.passage_prefix) == E5
    settings = RetrieverConfig(
        "dense", str(corpus_path), str(folder), encoder=EncoderConfig(encoder)
    )
    facts = build_retriever(settings).info()["encoder"]  # type: ignore[attr-defined]
    assert (facts["query_prefix"], facts["passage_prefix"]) == E5

    bge = make_folder("bge_base_en_v1.5")
    build_index(BuildConfig("bge", str(corpus_path), str(tmp_path / "i"), model_path=bge))
    assert opened("bge_base_en_v1.5") == BGE
    with pytest.raises(IndexMismatch, match="--encoder_family bge-en"):
        opened("encoder")
    assert opened("encoder", encoder_family="bge-en") == BGE
