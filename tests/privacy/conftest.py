"""An epsilon is reckoned once: each takes a seventh of a second."""

import functools
from collections.abc import Iterator
from unittest import mock

import pytest

from fedpfl.privacy import Account, samples


@pytest.fixture(scope="package", autouse=True)
def reckoned_once() -> Iterator[None]:
    with (
        mock.patch.object(Account, "epsilon", functools.cache(Account.epsilon)),
        mock.patch.object(samples, "compute_epsilon", functools.cache(samples.compute_epsilon)),
    ):
        yield
