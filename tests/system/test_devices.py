"""Devices by seed and profile, from a user's file, and what is said of a wrong one or a wrong
configuration.
"""

import math
import statistics

import pytest

from fedpfl.config.plan import check_config
from fedpfl.ground.errors import FedpflError
from fedpfl.system import PROFILES, Device, System, draw_devices, draw_stragglers
from tests.command import compose_once
from tests.conftest import read_cases
from tests.data.promises import one_line


def test_profiles_are_lognormal_about_their_medians(tmp_path):
    for name, (usual, spread) in PROFILES.items():
        drawn = draw_devices(System(profile=name), range(2000), 1, tmp_path)
        for what in ("speed", "down", "up"):
            logs = [math.log(getattr(device, what) / getattr(usual, what)) for device in drawn]
            assert abs(statistics.fmean(logs)) <= 4 * spread / 2000**0.5
            assert statistics.pstdev(logs) == pytest.approx(spread, rel=0.07)
        assert {device.availability for device in drawn} == {usual.availability}
        ratios = [device.down / device.up for device in drawn]
        assert ratios == pytest.approx([usual.down / usual.up] * 2000)


def test_a_client_has_the_same_device_whoever_else_there_is(tmp_path):
    system = System(speed=3e9, spread=0.3)
    everyone = draw_devices(system, range(20), 7, tmp_path)
    assert draw_devices(system, [3, 11], 7, tmp_path) == [everyone[3], everyone[11]]
    assert draw_devices(system, [3], 8, tmp_path) != [everyone[3]]
    alike = draw_devices(System(speed=3e9, spread=0.0), range(20), 7, tmp_path)
    assert {device.speed for device in alike} == {3e9}


def test_stragglers_are_drawn_once():
    found = draw_stragglers(System(stragglers=0.3, least=2), 50, 5, 1)
    assert len(found) == 15
    assert {*found.values()} == {2, 3, 4}
    assert draw_stragglers(System(), 50, 5, 1) == {}


def test_a_file_of_devices(tmp_path, monkeypatch):
    rows = "client,up,speed,down,availability\n1,3,1e9,2,1\n0,30,1e8,20,0.5\n"
    (tmp_path / "own.csv").write_text(rows)
    system = System(profile="own.csv")
    devices = [Device(1e8, 20, 30, 0.5), Device(1e9, 2, 3, 1)]
    assert draw_devices(system, [0, 1], 1, tmp_path) == devices
    assert devices[0].seconds(operations=5e7, bits_down=40.0, bits_up=30.0) == 0.5 + 2.0 + 1.0
    monkeypatch.chdir(tmp_path)
    assert draw_devices(system, [1], 1, tmp_path / "none") == devices[1:]


HEAD = "client,speed,down,up\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "cannot be read: No such file"),
        ("client,speed,up\n0,1,1\n", "line 2: down: Field required"),
        (HEAD + "0,1,1,1\n", "has no row for client 1; add it"),
        (HEAD + "0,1,1,1\n1,0,1,1\n", "line 3: speed: .* greater than 0, got '0'"),
        (HEAD + "0,1,1,1\n0,1,1,1\n", "line 3: client 0 is there twice"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path, text, told):
    if text is not None:
        (tmp_path / "own.csv").write_text(text)
    with pytest.raises(FedpflError, match=told) as error:
        draw_devices(System(profile="own.csv"), [0, 1], 1, tmp_path)
    assert str(error.value).startswith("system.profile: ")


LINES = """
system.late=partial | late must be drop where system.deadline is null
system.stragglers=0.2 system.least=5 | least must be below local training, 5
system.profile=own.csv system.speed=1e9 | speed must be null beside system.profile=own.csv
"""


@pytest.mark.parametrize(("words", "told"), read_cases(LINES, " | "))
def test_a_wrong_configuration_is_one_line(words, told):
    assert told in one_line(lambda: check_config(compose_once("system=simulated", *words.split())))
