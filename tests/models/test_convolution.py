"""Convolutions with channels last equal those with channels first."""

import pytest
import torch
from torch.func import functional_call, grad, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from fedpfl.models import convolution
from fedpfl.models.convolution import Conv2d


class _SeenWeights(TorchDispatchMode):
    """Note whether the weights of each convolution have their channels last."""

    def __init__(self):
        super().__init__()
        self.has_channels_last = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "convolution" in str(function):
            weight = args[2] if "backward" in str(function) else args[1]
            last = weight.is_contiguous(memory_format=torch.channels_last)
            self.has_channels_last.append(last)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("several", [False, True], ids=["one model", "three models"])
def test_channels_last_change_the_layout_and_nothing_else(several, monkeypatch):
    layer = Conv2d(8, 6, 5)
    models = (3,) if several else ()
    params = {"weight": torch.randn(*models, 6, 8, 5, 5), "bias": torch.randn(*models, 6)}
    x = torch.randn(*models, 4, 8, 9, 9)

    def mean_square(params, x):
        return functional_call(layer, params, (x,)).square().mean()

    differentiate = vmap(grad(mean_square)) if several else grad(mean_square)
    plain = differentiate(params, x)
    monkeypatch.setattr(convolution, "prefers_channels_last", lambda x, weight: True)
    with _SeenWeights() as seen:
        other = differentiate(params, x)
    assert seen.has_channels_last == [True, True]  # forwards, backwards
    for name, value in plain.items():
        assert other[name].is_contiguous()
        torch.testing.assert_close(other[name], value)


def test_on_a_cpu_channels_stay_first():
    with torch.autocast("cpu", torch.bfloat16):
        assert not convolution.prefers_channels_last(torch.ones(1), torch.ones(64, 32, 5, 5))
