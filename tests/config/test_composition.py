"""Configurations that are composed once for equal choices of groups are those that Hydra composes."""

import pytest
from hydra.core.singleton import Singleton
from omegaconf import OmegaConf

from fedpfl.config import overrides
from fedpfl.config.run_location import register_resolver

WORDS = [
    "",
    "method=fedper rounds=4 local.lr=0.5",
    "rounds=4 method=fedper seed=3 hydra.run.dir=x",
    "++name=abc debug=fast",
]
WRONG = ["round=4", "method=nope", "local.lr=["]


def compose(words):
    """Return the configuration with all that Hydra notes in it, or its error."""
    try:
        config = overrides.compose_config(words.split())
    except overrides.HYDRA_ERRORS as error:
        return type(error), str(error)
    return OmegaConf.to_container(config), config._metadata.flags


def test_words_give_the_same_in_any_company():
    """Also when they come again."""
    expected = [compose(words) for words in [*WORDS, *WRONG]]
    with overrides.composing_once():
        found = [(compose(words), compose(words)) for words in [*WORDS, *WRONG]]
    assert [first for first, _ in found] == expected
    assert [second for _, second in found] == expected


def test_a_configuration_may_be_changed_without_harm_to_the_next():
    with overrides.composing_once():
        overrides.compose_config(["method=fedper"]).method.name = "changed"
        assert overrides.compose_config(["method=fedper"]).method.name == "fedper"


def test_a_launcher_can_send_what_composition_needs_to_its_workers():
    cloudpickle = pytest.importorskip("cloudpickle")
    register_resolver()
    cloudpickle.dumps(Singleton.get_state())
