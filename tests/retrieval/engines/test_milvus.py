"""Milvus' words for indexes, its errors and its texts; searches are in `test_remote`."""

import pytest
from pymilvus import MilvusException

from search_r1.retrieval.engines.milvus import _effort, read_factory, translated
from search_r1.retrieval.engines.remote import Address
from search_r1.retrieval.errors import SearchError, SetupError, UpstreamRefused, UpstreamUnavailable
from search_r1.retrieval.settings import FaissConfig

ADDRESS = Address("milvus", "http://127.0.0.1:19530", "wiki")


@pytest.mark.parametrize(
    ("factory", "expected"),
    [
        ("Flat", ("FLAT", {})),
        ("HNSW32", ("HNSW", {"M": 32, "efConstruction": 360})),
        ("IVF4096,Flat", ("IVF_FLAT", {"nlist": 4096})),
        ("IVF4096,SQ8", ("IVF_SQ8", {"nlist": 4096})),
        ("IVF4096,PQ64", ("IVF_PQ", {"nlist": 4096, "m": 64, "nbits": 8})),
        ("AUTOINDEX", ("AUTOINDEX", {})),
    ],
)
def test_factories_of_faiss_are_understood(factory: str, expected: tuple[str, dict]) -> None:
    assert read_factory(factory) == expected


@pytest.mark.parametrize("factory", ["", "SQ8", "flat", "OPQ64,IVF4096,PQ64", "HNSW"])
def test_other_factories_are_refused(factory: str) -> None:
    with pytest.raises(SetupError, match="--faiss_type"):
        read_factory(factory)


def test_an_approximate_search_keeps_as_many_candidates_as_hits() -> None:
    """Milvus refuses a smaller `ef`."""
    assert _effort("HNSW64", 100, FaissConfig(ef_search=20)) == {"ef": 100}
    assert _effort("HNSW64", 10, FaissConfig(ef_search=200)) == {"ef": 200}
    assert _effort("IVF4096,Flat", 10, FaissConfig(nprobe=5)) == {"nprobe": 5}
    assert _effort("Flat", 10, FaissConfig()) == {}


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ("auth check failure, please check username and password", UpstreamRefused),
        ("collection not loaded", UpstreamUnavailable),
    ],
)
def test_an_outage_is_waited_for_and_a_wrong_token_is_not(
    message: str, error: type[SearchError]
) -> None:
    """The server answers 503 to the one and 424 to the other."""
    with pytest.raises(error), translated(ADDRESS):
        raise MilvusException(1, message)
