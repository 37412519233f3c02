"""Configurations that are composed once for equal choices of groups are those that Hydra composes."""

from omegaconf import OmegaConf

from fedpfl.config import overrides

WORDS = (
    "method=fedper rounds=4 local.lr=0.5",
    "rounds=5 method=fedper ~eval.every",
    "method=fedper method.head_init=initial method={head_init:server_average}",
    "++name=abc debug=fast",
    "round=4",
    "method=nope",
)


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
