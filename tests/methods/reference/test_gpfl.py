"""GPFL against plain loops with torch's modules and two optimisers."""

import pytest

from fedpfl.engine import make_backend
from fedpfl.engine.calls import EvalCall
from fedpfl.methods import GPFL
from tests.conftest import CLASSES, CPU, as_engine, assert_close, client_row, record_rounds
from tests.methods.reference.conftest import SEED
from tests.methods.reference.gpfl import gpfl

TOLERANCE = {
    "atol": 2e-5,
    "rtol": 1e-4,
}  # a layer normalisation and cosines divide by small numbers
NAMES = {"weight": "0.weight", "bias": "0.bias", "scale": "2.weight", "shift": "2.bias"}


def modules(server):
    """The valve and the embeddings, as the plain loops call them."""
    layers = (
        (part, name, leaf)
        for part, layer in server["valve"].items()
        for name, leaf in layer.items()
    )
    named = {f"{part}.{NAMES[name]}": leaf for part, name, leaf in layers}
    return {"embeddings.weight": server["embeddings"], **named}


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("values", [(0.01, 0.1, "frobenius"), (0.3, 0.0, "mean")], ids=str)
def test_three_rounds_equal_the_plain_loops(
    values, norm, backend, setting, normed, net, federation
):
    net, setting = normed if norm else (net, setting)
    method = GPFL(*values)
    initial = modules(method.init(net.params, net.parts)[0])
    bodies, extras, heads, logits, want = gpfl(setting, initial, *values, CLASSES)
    states, outcomes = record_rounds(method, net, federation, engine=backend, seed=SEED)
    for t, (state, outcome) in enumerate(zip(states[1:], outcomes, strict=True)):
        body = {**state.server["body"], **(state.server_buffers["main"] if norm else {})}
        body.pop("norm.num_batches_tracked", None)
        assert_close(body, {name: bodies[t][name] for name in body}, **TOLERANCE)
        assert_close(modules(state.server), extras[t], **TOLERANCE)
        for client, head in enumerate(heads[t]):
            assert_close(client_row(state.clients["head"], client), head, **TOLERANCE)
        assert outcome.before.correct.tolist() == want.before[t]
        assert outcome.after.correct.tolist() == want.after[t]
        tally = make_backend(as_engine(backend), net, CPU).evaluate(
            EvalCall(method, federation, state, list(range(10)))
        )
        right = [
            int((o.argmax(1) == c.test_y).sum())
            for o, c in zip(logits[t], setting.clients, strict=True)
        ]
        assert tally.correct.tolist() == right
