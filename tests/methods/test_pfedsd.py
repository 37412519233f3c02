"""pFedSD: the statistics of a teacher."""

from functools import cache

from fedpfl.methods import PFedSD
from tests.conftest import (
    differing,
    make_federation,
    participate,
    record_states,
    tiny,
    with_client_states,
)


@cache
def played(backend, norm=False):
    """The states of three rounds."""
    return record_states(PFedSD(), tiny(norm), make_federation(), engine=backend)


def test_a_teachers_passes_count_nothing(backend):
    counted = (
        played(backend, norm=True)[-1].client_buffers["main"]["norm.num_batches_tracked"].tolist()
    )
    assert counted[2] == 2 * 2 * 2  # two rounds of two epochs of two batches
    assert counted[9] == 0


def test_a_teacher_judges_by_its_own_statistics_or_by_the_minibatchs(backend, federation):
    """The statistics that the client's last training left, however far training has moved them
    since.
    """
    net = tiny(norm=True)
    state = played(backend, norm=True)[2]
    moved = {"main": {**state.client_buffers["main"]}}
    moved["main"]["norm.running_mean"] = moved["main"]["norm.running_mean"] + 1
    for teacher in ("eval", "train"):
        method = PFedSD(teacher=teacher)
        one, other = (
            participate(method, net, federation, s, [2], engine=backend)
            for s in (state, with_client_states(state, buffers=moved))
        )
        assert bool(differing(one.uploads, other.uploads)) == (teacher == "eval")
    assert set(state.client_buffers) == {"main"}
    assert state.server_buffers == {}
