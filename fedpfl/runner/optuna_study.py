"""Import Optuna, and translate Hydra's sweeps into its distributions."""

from __future__ import annotations

from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep

from fedpfl.config.overrides import requote_word
from fedpfl.ground.errors import FedpflError, missing_extra


def import_optuna() -> Any:
    """Import Optuna when it is first asked for, as it is an extra. Raises FedpflError."""
    try:
        import optuna
    except ImportError:
        raise missing_extra("tuning needs Optuna, which is not installed", "tune") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def parse_distribution(override: Override) -> Any:
    """Return Optuna's distribution for a sweep in Hydra's words.

    `a,b` and `choice(a, b)` are a choice, `range(1, 9, 2)` whole numbers, `interval(0.1, 1)` any,
    and `tag(log, interval(...))` uniform in the logarithm.

    Raises:
        FedpflError: for another sweep.
    """
    # ---- choice(a, b)
    distributions = import_optuna().distributions
    sweep = override.value()
    if isinstance(sweep, ChoiceSweep):
        choices = tuple(map(str, override.sweep_string_iterator()))
        return distributions.CategoricalDistribution(choices)

    # ---- range(start, stop, step)
    if isinstance(sweep, RangeSweep):
        numbers = [number for number in (sweep.start, sweep.stop, sweep.step) if number is not None]
        if len(numbers) < 3 or not all(float(number).is_integer() for number in numbers):
            raise FedpflError(
                f"{override.input_line}: ranges are of whole numbers; use interval(...) or "
                "choice(...)"
            )
        start, stop, step = map(int, numbers)
        # Optuna's upper end is a value; Hydra's is not.
        largest = start + (stop - 1 - start) // step * step
        return distributions.IntDistribution(start, largest, step=step)

    # ---- interval(start, end)
    if isinstance(sweep, IntervalSweep) and sweep.start is not None and sweep.end is not None:
        is_logarithmic = "log" in sweep.tags
        return distributions.FloatDistribution(sweep.start, sweep.end, log=is_logarithmic)
    raise FedpflError(
        f"{override.input_line} cannot be searched; use choice(...), range(...) or interval(...)"
    )


def parse_example(word: str) -> str:
    """Return a swept word with its first or lowest value. Raises FedpflError as above."""
    override = OverridesParser.create().parse_override(word)
    return name_example(override.get_key_element(), parse_distribution(override))


def name_example(key: str, distribution: Any) -> str:
    """Return the word of the first or lowest value that Optuna may draw."""
    choices = getattr(distribution, "choices", None)
    return requote_word(f"{key}={choices[0] if choices else distribution.low}")
