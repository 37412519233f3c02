"""An epsilon is reckoned once, and by few orders where it may be any."""

import contextlib
import functools
import inspect
from collections.abc import Iterator
from unittest import mock

import pytest

from fedpfl.privacy import Account, accounting, samples

FEW_ORDERS = (2, 4, 8, 16, 32)
CACHED = ((Account, "epsilon"), (samples, "compute_epsilon"), (samples, "calibrate_noise"))


@pytest.fixture(scope="package", autouse=True)
def reckoned_once() -> Iterator[None]:
    with mock.patch.object(Account, "epsilon", functools.cache(Account.epsilon)):
        yield


@contextlib.contextmanager
def reckon_by_few_orders() -> Iterator[None]:
    """Reckon an epsilon in a tenth of the time, and a little higher than all orders have it."""
    with contextlib.ExitStack() as stack:
        for module in (accounting, samples):
            stack.enter_context(mock.patch.object(module, "ORDERS", FEW_ORDERS))
        for owner, name in CACHED:  # a cache would keep what was reckoned by the others
            function = functools.cache(inspect.unwrap(getattr(owner, name)))
            stack.enter_context(mock.patch.object(owner, name, function))
        yield


@pytest.fixture(scope="module")
def few_orders() -> Iterator[None]:
    """Let runs reckon by few orders: what epsilons are is for test_privacy.py to try."""
    with reckon_by_few_orders():
        yield
