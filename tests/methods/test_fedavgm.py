"""FedAvgM's server step, plain and Nesterov's, is that of torch.optim.SGD on the clients' mean
change.
"""

import pytest
import torch

from fedpfl.methods.fedavgm import FedAvgM


@pytest.mark.parametrize("nesterov", [False, True])
def test_the_server_steps_as_torchs_sgd_does(nesterov):
    method = FedAvgM(lr=0.3, momentum=0.8, nesterov=nesterov)
    parameter = torch.nn.Parameter(torch.tensor([1.0, -2.0, 0.5]))
    optimizer = torch.optim.SGD([parameter], lr=0.3, momentum=0.8, nesterov=nesterov)
    server, _ = method.init({"w": parameter.detach().clone()}, None)
    generator = torch.Generator().manual_seed(0)
    weight = torch.tensor([0.25, 0.75])
    for _ in range(4):
        uploads = {"w": server["model"]["w"] + torch.randn(2, 3, generator=generator)}
        change = (weight[:, None] * uploads["w"]).sum(0) - server["model"]["w"]
        server, _ = method.aggregate(server, {}, None, uploads, weight, None)
        parameter.grad = -change
        optimizer.step()
        torch.testing.assert_close(server["model"]["w"], parameter.detach())
