"""Files that are written whole or not at all."""

import pytest

from fedpfl.ground import files
from fedpfl.ground.errors import FedpflError


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
