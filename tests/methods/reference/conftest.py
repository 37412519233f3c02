"""The setting of the package's small federation, as the plain loops want it."""

import copy
import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from fedpfl.data.federation import Federation
from fedpfl.engine import State
from fedpfl.engine.keys import Draws
from fedpfl.methods import Method
from fedpfl.models import Net
from tests import conftest
from tests.conftest import COHORTS, LOCAL, TRAIN, Tiny, tiny
from tests.methods.reference import plain

SEED = 3


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave `make test` the first case of each test for each method that its parameters name."""
    first_cases: dict[Any, str] = {}
    for item in items:
        call = getattr(item, "callspec", None)
        if (
            not call
            or Path(__file__).parent not in item.path.parents
            or item.path.stem == "test_reference"
        ):
            continue
        values = {name: value for name, value in call.params.items() if name != "backend"}
        methods = tuple(value for value in values.values() if inspect.isclass(value))
        case = str(values)
        if first_cases.setdefault((item.function, methods), case) != case:
            item.add_marker(pytest.mark.full)


@pytest.fixture(scope="module")
def setting(net, federation) -> plain.Setting:
    return describe_setting(net, federation)


def describe_setting(net: Net, federation: Federation) -> plain.Setting:
    def samples(index: Tensor) -> tuple[Tensor, Tensor]:
        return (federation.x[index].float() / 255 - 0.4) / 0.3, federation.y[index]

    held = federation.validation or [own[:0] for own in federation.train]
    clients = [
        plain.Client(*(part for index in own for part in samples(index)))
        for own in zip(federation.train, federation.test, held, strict=True)
    ]

    def order(t: int, client: int, epoch: int, samples: int) -> Tensor:
        return Draws(SEED, "train", t).order(client, "main", epoch, samples)

    module = copy.deepcopy(net.module)
    module.load_state_dict(net.params)
    return plain.Setting(
        module,
        clients,
        COHORTS,
        order,
        LOCAL.epochs,
        LOCAL.batch_size,
        LOCAL.lr,
        LOCAL.momentum,
        LOCAL.weight_decay,
    )


@pytest.fixture(scope="module")
def normed(setting) -> tuple[Net, plain.Setting]:
    """A network with BatchNorm, and the setting with the same in torch's."""
    net, module = tiny(norm=True), Tiny()
    module.norm = nn.BatchNorm2d(4)
    module.load_state_dict({**net.params, **net.buffers})
    return net, dataclasses.replace(setting, module=module)


def draw_randoms(t: int, client: int, epoch: int, count: int) -> Tensor:
    """What samples are given in local training, `[samples, count]`, in the epoch's order: drawn
    first for each batch's first sample, then for each one's second.
    """
    samples = TRAIN[client]
    batches, size = (
        samples // LOCAL.batch_size + (samples % LOCAL.batch_size > 1),
        min(LOCAL.batch_size, samples),
    )
    drawn = Draws(SEED, "train", t).random(client, "main", epoch, batches * size, count)
    return drawn.view(size, batches, count).transpose(0, 1).reshape(-1, count)[:samples]


def evaluated_weights(
    method: Method, net: Net, federation: Federation, state: State, client: int
) -> plain.Weights:
    """The parameters and statistics by which the engine evaluates a client between rounds."""
    job = conftest.find_eval_job(method, net, federation, state, client)
    role = "main" if "main" in method.buffers() else list(method.buffers())[-1]
    return {**job.params, **job.buffers.get(role, {})}
