"""Configurations that are composed once for equal choices of groups are those that Hydra composes."""

import copy
from unittest import mock

import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.singleton import Singleton
from hydra.types import RunMode
from omegaconf import OmegaConf

from fedpfl.config import overrides
from fedpfl.config.composition import CachingLoader
from fedpfl.config.run_location import register_resolver
from fedpfl.train import CONF

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


def test_a_job_that_was_checked_is_composed_for_its_run_no_more():
    with initialize_config_dir(CONF, version_base="1.3"):
        hydra = GlobalHydra.instance().hydra
        master = hydra.compose_config("train", ["seed=1"], RunMode.MULTIRUN)
        loader = CachingLoader(hydra.config_loader)
        jobs = [["seed=2"], ["seed=3", "local.lr=0.5"], ["seed=2"]]
        plain = [hydra.config_loader.load_sweep_config(master, list(words)) for words in jobs]
        with mock.patch.object(
            loader, "load_configuration", wraps=loader.load_configuration
        ) as calls:
            ahead = [loader.load_sweep_config(master, list(words)) for words in jobs[:2]]
            assert not copy.copy(loader)._jobs_ahead  # each worker is sent the loader
            ahead[0].hydra.job.num = 7  # as a launcher numbers it
            found = [loader.load_sweep_config(master, list(words)) for words in jobs]
        OmegaConf.set_readonly(found[2].hydra, True)  # as Hydra does with a job that it runs
        loader.load_sweep_config(master, ["seed=2"]).hydra.job.id = "another job, equal to it"
    assert calls.call_count == 3
    assert found[2] is not found[0]
    for job, expected in zip([found[1], found[2]], plain[1:], strict=True):
        assert OmegaConf.to_container(job) == OmegaConf.to_container(expected)


def test_a_launcher_can_send_what_composition_needs_to_its_workers():
    cloudpickle = pytest.importorskip("cloudpickle")
    register_resolver()
    cloudpickle.dumps(Singleton.get_state())
