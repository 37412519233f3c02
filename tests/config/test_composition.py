"""Configurations that are composed once for equal choices of groups are those that Hydra composes."""

import pytest
from hydra.core.singleton import Singleton
from omegaconf import OmegaConf

from fedpfl.config import overrides
from fedpfl.config.run_location import register_resolver

WORDS = ("method=fedper rounds=4 local.lr=0.5", "++name=abc debug=fast", "round=4", "method=nope")


def compose(words):
    """Return the configuration with all that Hydra notes in it, or its error."""
    try:
        config = overrides.compose_config(words.split())
    except overrides.HYDRA_ERRORS as error:
        return type(error), str(error)
    return OmegaConf.to_container(config), config._metadata.flags


def test_words_give_the_same_in_any_company():
    """Also when they come again, and where somebody has changed the first."""
    expected = [compose(words) for words in WORDS]
    with overrides.composing_once():
        overrides.compose_config(WORDS[0].split()).method.name = "changed"
        assert [compose(words) for words in [*WORDS, *WORDS]] == [*expected, *expected]


def test_a_launcher_can_send_what_composition_needs_to_its_workers():
    cloudpickle = pytest.importorskip("cloudpickle")
    register_resolver()
    cloudpickle.dumps(Singleton.get_state())
