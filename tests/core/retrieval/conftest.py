"""The small corpus, its engines and its queries."""

from tests.retrieval.conftest import corpus_path as corpus_path
from tests.retrieval.conftest import open_engine as open_engine
from tests.retrieval.conftest import queries as queries
