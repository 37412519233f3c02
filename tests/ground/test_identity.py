"""Identities of configurations, values that every file can hold, files that are written whole."""

import pytest

from fedpfl.ground import files
from fedpfl.ground.checks import require_representable
from fedpfl.ground.decile import worst_decile_size
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.identity import identity

CONFIG = {"rounds": 2, "method": {"name": "fedavg"}, "local": {"lr": 0.1}}


def test_an_option_that_does_nothing_is_no_part_of_an_identity():
    off = {"unseen": 0.0, "task": "classification", "metrics": [], "adapter": {"pairs": 1}}
    assert identity({**CONFIG, **off}) == identity(CONFIG)
    for option, value in (("unseen", 0.1), ("task", "regression"), ("adapter", {"pairs": 2})):
        assert identity({**CONFIG, option: value}) != identity(CONFIG)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (-(2**63) - 1, "at most 64 bits"),
        (1e-39, "as float32 is"),
        ({"inner": float("inf")}, r"key\.inner must be within .*, got inf"),
    ],
)
def test_what_no_file_or_tensor_holds_is_refused_and_the_rest_is_taken(value, text):
    with pytest.raises(FedpflError, match=text):
        require_representable(value, "key")
    for taken in (2**63 - 1, -(2**63), 0.0, 3e38, 2e-38, "text", [1, 2.5], {"inner": None}):
        require_representable(taken, "key")


def test_the_worst_decile_is_a_tenth_of_the_clients_and_never_none():
    clients = (1, 9, 10, 19, 20, 101)
    assert [worst_decile_size(count) for count in clients] == [1, 1, 1, 1, 2, 10]


def test_a_file_takes_its_place_when_all_went_well(tmp_path):
    path = tmp_path / "table.csv"
    with files.atomic_write(path) as aside:
        aside.write_text("new")
        assert not path.exists()
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("table.csv", "new")]
    interrupted = pytest.raises(KeyboardInterrupt)
    with interrupted, files.atomic_write(path) as aside:
        aside.write_text("half")
        raise KeyboardInterrupt
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("table.csv", "new")]


def test_what_has_become_another_processs_is_left_alone(tmp_path):
    path, ours = tmp_path / "state.pt", [True]

    def guard() -> None:
        if not ours[0]:
            raise FedpflError("another process writes there")

    refused = pytest.raises(FedpflError, match="another process")
    with refused, files.durable_write(path, guard) as file:
        file.write(b"theirs")
        ours[0] = False
    assert not path.exists()
    assert files.temporary_path(path).read_bytes() == b"theirs"
