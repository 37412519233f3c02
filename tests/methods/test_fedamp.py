"""FedAMP and HeurFedAMP (arXiv:2007.03797): the cloud model of many clients."""

import pytest
import torch

from fedpfl.ground import tree
from fedpfl.methods import FedAMP
from tests.conftest import assert_close


@pytest.mark.parametrize(("variant", "sigma"), [("fedamp", 1e9), ("heurfedamp", 1e-9)])
def test_without_a_difference_in_attention_the_cloud_is_the_mean(variant, sigma, net):
    """Of seventeen, more than the server looks at at once."""
    generator = torch.Generator().manual_seed(0)
    models = tree.map(
        lambda leaf: leaf + 0.1 * torch.randn(17, *leaf.shape, generator=generator), net.params
    )
    states = {"model": models, "number": torch.arange(17)}
    server = {"pool": torch.ones(17, dtype=torch.bool)}
    method = FedAMP(variant, sigma=sigma, share=16 / 17)
    found = method.before_turn(
        server, states, lambda numbers: tree.take(states, torch.tensor(numbers)), torch.Generator()
    )
    mean = tree.map(lambda leaf: leaf.mean(0).expand_as(leaf), models)
    assert_close(found["cloud"], mean, atol=1e-5)
