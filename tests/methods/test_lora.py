"""FFA-LoRA averages exactly; SDFLoRA's stacks are compressed to the nearest of their rank."""

import pytest
import torch

from fedpfl.engine import make_initial_state
from fedpfl.methods import FedAvg, FFALoRA
from fedpfl.methods.sdflora import compress_pair, stack_pairs
from tests.conftest import (
    CPU,
    assert_close,
    client_row,
    find_eval_job,
    make_federation,
    participate,
    record_states,
    tiny,
)

A, B = 2 * (9 + 36), 2 * (4 + 12)  # entries, of rank 2 in conv and fc


@pytest.fixture(scope="module")
def three():
    return make_federation((40, 33, 65), (10, 8, 16))


def of(params, *endings):
    return {name: value for name, value in params.items() if name.endswith(endings)}


def products(params, scale=1.0):
    """What is added to the weights."""
    return {
        name: scale * params[name[:-1] + "B"].flatten(1) @ params[name].flatten(1)
        if params[name].dim() == 4
        else scale * params[name[:-1] + "B"][0] @ params[name][0]
        for name in of(params, "lora_A")
    }


def test_the_average_of_adapted_weights_is_exact_where_a_is_fixed_alone(three):
    net, weight = tiny(pairs=1), torch.tensor([40, 33, 65]) / 138
    for method, exact in ((FFALoRA(), True), (FedAvg(), False)):
        first = make_initial_state(method, net, 3, CPU)
        uploads = participate(method, net, three, first, [0, 1, 2]).uploads
        after = find_eval_job(
            method, net, three, record_states(method, net, three, [[0, 1, 2]])[-1], 0
        ).params
        sent = [products({**net.params, **client_row(uploads, client)}) for client in range(3)]
        wanted = {
            name: sum(share * own[name] for share, own in zip(weight, sent, strict=True))
            for name in sent[0]
        }
        found = products(after)
        near = all(
            torch.allclose(found[name], wanted[name], rtol=1e-5, atol=1e-7) for name in wanted
        )
        assert near == exact


def test_a_stack_is_compressed_to_the_nearest_of_its_rank():
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(3, 2, 2, 9, generator=g), torch.randn(3, 2, 7, 2, generator=g)
    weight = torch.tensor([0.5, 0.2, 0.3])
    whole = (weight.view(-1, 1, 1, 1) * (b @ a)).sum(0)
    for rank in (2, 6):
        low, up = compress_pair(*stack_pairs(a, b, weight), rank)
        assert (low.shape, up.shape) == ((2, rank, 9), (2, 7, rank))
        u, s, v = torch.linalg.svd(whole, full_matrices=False)
        nearest = (u[..., :rank] * s[:, None, :rank]) @ v[:, :rank]
        assert_close({"": up @ low}, {"": nearest}, atol=1e-5)
        assert_close({"": low @ low.mT}, {"": torch.eye(rank).expand(2, rank, rank)}, atol=1e-5)
    assert_close({"": up @ low}, {"": whole}, atol=1e-5)  # rank 6 holds all
    images = a[:, 0].reshape(3, 2, 1, 3, 3), b[:, 0].reshape(3, 7, 2, 1, 1)
    assert_close(
        {"": torch.cat(compress_pair(*stack_pairs(*images, weight), 6)[:1])},
        {"": low[:1]},
        atol=1e-5,
    )
    low, up = compress_pair(*stack_pairs(a, 0 * b, weight), 2)  # of what nobody has trained
    assert not up.any()
    assert (low.square().sum(-1) > 0.9).all()  # and B has a gradient still
