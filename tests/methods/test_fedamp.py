"""FedAMP and HeurFedAMP (arXiv:2007.03797): limits of the cloud model."""

import pytest
import torch

from fedpfl.ground import tree
from fedpfl.methods import FedAMP
from tests.conftest import assert_close, assert_same

VARIANTS = pytest.mark.parametrize("variant", ["fedamp", "heurfedamp"])


def clouds(method, models, numbers=None):
    """The cloud models of clients `numbers` (all), by the models `[clients, ...]` of all."""
    count = len(tree.leaves(models)[0])
    states = {"model": models, "number": torch.arange(count)}
    server = {"pool": torch.ones(count, dtype=torch.bool)}
    others = lambda numbers: tree.take(states, torch.tensor(numbers))  # noqa: E731
    given = tree.take(states, torch.tensor(numbers or range(count)))
    return method.before_turn(server, given, others, torch.Generator())


@pytest.fixture(scope="module")
def models(net):
    """Seventeen, more than the server looks at at once."""
    generator = torch.Generator().manual_seed(0)
    return tree.map(
        lambda leaf: leaf + 0.1 * torch.randn(17, *leaf.shape, generator=generator), net.params
    )


@VARIANTS
def test_limits_of_the_cloud_model(variant, models):
    mean, share = tree.map(lambda leaf: leaf.mean(0).expand_as(leaf), models), 16 / 17
    assert_same(clouds(FedAMP(variant, share=0.0), models)["cloud"], models)
    flat = FedAMP(variant, sigma=1e9 if variant == "fedamp" else 1e-9, share=share)
    assert_close(clouds(flat, models)["cloud"], mean, atol=1e-5)
    if variant == "fedamp":
        assert_same(clouds(FedAMP(sigma=1e-3), models)["cloud"], models)
    else:
        scaled = clouds(FedAMP(variant, sigma=20.0), tree.map(lambda leaf: 3.0 * leaf, models))[
            "cloud"
        ]
        assert_close(
            scaled,
            tree.map(lambda leaf: 3.0 * leaf, clouds(FedAMP(variant, sigma=20.0), models)["cloud"]),
        )
    same = tree.map(lambda leaf: leaf[:1].expand_as(leaf), models)
    assert_close(clouds(FedAMP(variant), same)["cloud"], same)
    for name, cloud in clouds(FedAMP(variant, sigma=5.0, share=1.0), models)["cloud"].items():
        assert (cloud <= models[name].amax(0) + 1e-6).all()
        assert (cloud >= models[name].amin(0) - 1e-6).all()
