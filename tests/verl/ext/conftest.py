"""Fixtures of the tests of extensions."""

from tests.verl.training.conftest import single_rank as single_rank
