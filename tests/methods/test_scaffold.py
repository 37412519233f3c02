"""SCAFFOLD (arXiv:1910.06378) with momentum."""

import dataclasses

from fedpfl.engine import Local, make_initial_state
from fedpfl.ground import tree
from fedpfl.methods import Scaffold
from tests.conftest import CPU, assert_close, assert_same, participate

METHOD = Scaffold()


def test_with_momentum_a_control_is_still_a_mean_gradient(net, federation):
    """Of one step: the gradient itself, whatever the momentum."""
    one = Local(epochs=1, batch_size=512, lr=0.05)
    state = make_initial_state(METHOD, net, 10, CPU)
    plain, heavy = (
        participate(METHOD, net, federation, state, [2], local=dataclasses.replace(one, momentum=m))
        for m in (0.0, 0.9)
    )
    assert_same(plain.client_states["control"], heavy.client_states["control"])
    change = tree.take(plain.uploads["model"], 0)
    control = tree.take(plain.client_states["control"], 0)
    assert_close(control, tree.map(lambda dy: -dy / one.lr, change), atol=1e-5, rtol=1e-3)
