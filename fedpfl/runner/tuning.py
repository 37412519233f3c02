"""Methods tuned on equal terms: a search for each, and what it chose run with fresh seeds."""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from fedpfl.config import overrides
from fedpfl.config.choices import GROUPS
from fedpfl.config.plan import check_config
from fedpfl.ground import drawing
from fedpfl.ground.errors import FedpflError, pluralize
from fedpfl.ground.terminal import print_notice
from fedpfl.report import load, reading
from fedpfl.report.names import METHOD_TITLES
from fedpfl.report.table import Column, Table, mean_and_std
from fedpfl.report.tables import best_round
from fedpfl.runner import resume, trials
from fedpfl.runner.faults import EXIT_STATUS, Diverged
from fedpfl.runner.spaces import find_edge_values, keep_within_limits, make_search_space

JUDGED = {
    "accuracy": Column("mean", "percent", "test accuracy"),
    "accuracy_pooled": Column("pooled", "percent", "test accuracy"),
    "ft_accuracy": Column("fine-tuned", "percent", "test accuracy"),
    "unseen_accuracy": Column("unseen", "percent"),
}
"""By what of its run each seed is judged."""
COLUMNS = {
    "method": Column("method"),
    "chosen": Column("chosen", "long"),
    "finished": Column("finished", "whole", "trials"),
    "given up": Column("given up", "whole", "trials"),
    "rounds": Column("rounds", "whole", "trials"),
    "validation": Column("validation", "percent"),
    **JUDGED,
    "seeds": Column("seeds", "whole"),
}


class TuningRequest(NamedTuple):
    """What is asked for: the methods, how many trials and fresh seeds, where to write, and words
    for all.
    """

    methods: list[str]
    trials: int
    seeds: int
    folder: Path
    words: list[str]


def tune_methods(asked: TuningRequest, play: Callable[..., None]) -> Table:
    """Search for each method's values, run them with fresh seeds, and return a table of what came
    of it.

    play: does a command line of fedpfl.train's; but for exit status `bears` it does not return
    where that failed.
    """
    words = list(asked.words)
    if not any(word.lstrip("+").startswith("validation=") for word in words):
        words.append("validation=0.1")
    by_method = _words_by_method(asked.methods, words)
    # Fine-tuned columns choose nothing.
    spaces = {
        method: [*own, *make_search_space(method, own), "eval.finetune_epochs=0"]
        for method, own in by_method.items()
    }
    for method, searched in spaces.items():  # what one lacks is told hours before its turn
        _require_keys(method, searched)
    searches = {
        method: keep_within_limits(method, [f"method={method}", *own])
        for method, own in spaces.items()
    }
    records = [
        _tuned(asked, method, by_method[method], searched, play)
        for method, searched in searches.items()
    ]
    lost = [
        f"{record['method']}: {count} of the final runs diverged, so its test cells stay empty."
        for record in records
        if (count := asked.seeds - record["seeds"])
    ]
    edges = [
        f"{record['method']}: {record['at_end']}: at the end of what was searched; better values may lie beyond."
        for record in records
        if record["at_end"]
    ]
    return Table.of(
        [
            {**record, "method": METHOD_TITLES.get(record["method"], record["method"])}
            for record in records
        ],
        COLUMNS,
        title="Tuned on equal terms",
        frame=pd.DataFrame(records),
        caption=f"{pluralize(asked.trials, 'trial')} per method, chosen by validation accuracy; then "
        f"{pluralize(asked.seeds, 'other seed')}, "
        "each at its round of the best validation accuracy: mean (standard deviation over seeds), in percent.",
        notes=(
            "Rounds: played by all trials together. A trial below the others' median validation accuracy is given up.",
            *lost,
            *edges,
        ),
    )


def _words_by_method(methods: Sequence[str], words: Sequence[str]) -> dict[str, list[str]]:
    """Return each method's words: a `method.mu=...` that others of these methods have is not for
    one that lacks it.

    One that none has stays, to be refused.
    """
    others = [
        word for word in words if not word.startswith("method.") and not overrides.is_sweep(word)
    ]
    others = [word for word in others if not word.startswith("hydra.sweeper.")]
    keys = {
        method: {*overrides.compose_config([f"method={method}", *others]).method}
        for method in methods
    }
    anywhere = set[str]().union(*keys.values())
    by_method = {}
    for method in methods:
        absent = {f"method.{key}" for key in anywhere - keys[method]}
        lost = [word for word in words if word.partition("=")[0] in absent]
        for word in lost:
            print_notice(
                f"method={method} has no {word.partition('=')[0]}, so {word} is for the other methods alone"
            )
        by_method[method] = [word for word in words if word not in lost]
    return by_method


def _require_keys(method: str, words: Sequence[str]) -> None:
    """Compose a method's words, whatever the values of what is searched. Raises what Hydra does for
    unknown keys.
    """
    swept = [word.partition("=")[0] for word in words if overrides.is_sweep(word)]
    plain = [
        word
        for word in words
        if not (word.startswith("hydra.sweeper.") or word.partition("=")[0] in swept)
    ]
    overrides.compose_config(
        [f"method={method}", *plain, *(f"{key}=null" for key in swept if key not in GROUPS)]
    )


def _tuned(
    asked: TuningRequest,
    method: str,
    words: Sequence[str],
    searched: Sequence[str],
    play: Callable[..., None],
) -> dict[str, Any]:
    """Search for one method's values, run them with fresh seeds, and return what came of it."""
    options = ["-m", "hydra/sweeper=optuna", f"hydra.sweeper.trials={asked.trials}"]
    play([*options, *_below(asked.folder / "trials")], searched)
    found = trials.search_results[-1]
    draw(found, asked.folder, method)
    chosen = {word.partition("=")[0] for word in found.overrides}
    fixed = [
        word
        for word in words
        if not word.startswith("hydra.sweeper.") and word.partition("=")[0] not in chosen
    ]
    fixed = [f"method={method}", *fixed, *found.overrides]
    first = int(overrides.compose_single_run(fixed).seed) + 1
    seeds = [first + number for number in range(asked.seeds)]
    print_notice(
        f"method={method}: {pluralize(asked.seeds, 'fresh seed')} of {' '.join(found.overrides)}"
    )
    outdated = _by_other_code(asked.folder / "final", fixed, seeds)
    for some, more in (
        (outdated, ["restart=true"]),
        ([seed for seed in seeds if seed not in outdated], []),
    ):
        if some:
            final = [
                *fixed,
                f"seed=choice({','.join(map(str, some))})",
                "hydra.sweeper.table=false",
                *more,
            ]
            play(["-m", *_below(asked.folder / "final")], final, bears=EXIT_STATUS[Diverged])
    record = {
        "method": method,
        "chosen": " ".join(found.overrides),
        **found.trials,
        "rounds": found.rounds,
    }
    record |= {
        "validation": found.value,
        "at_end": " ".join(find_edge_values(method, found.overrides, found.space, words)),
    }
    again = [word for word in fixed if not overrides.is_hydra_setting(word)]
    record["command"] = shlex.join(
        ["python", "-m", "fedpfl.train", "-m", *again, f"seed={','.join(map(str, seeds))}"]
    )
    return record | _read_test_results(asked.folder / "final", fixed, seeds)


def _below(folder: Path) -> Iterator[str]:
    return overrides.format_words("hydra.sweep.dir", str(folder))


def find_run_directories(root: Path, words: Sequence[str], seeds: Sequence[int]) -> list[Path]:
    """Return the run directories of these words, one per seed."""
    return [
        root / overrides.compose_single_run([*words, f"seed={seed}"]).hydra.sweep.subdir
        for seed in seeds
    ]


def _by_other_code(root: Path, words: Sequence[str], seeds: Sequence[int]) -> list[int]:
    """Return the seeds whose runs another version of the code made, which cannot stand beside what
    was searched.
    """
    code = resume.digest_code(check_config(overrides.compose_single_run(words)))
    outdated = []
    for seed, place in zip(seeds, find_run_directories(root, words, seeds), strict=True):
        if (place / "summary.json").is_file():
            codes = reading.read_summary(place).get("code", [])
            outdated += [seed] if any(other != code for other in codes) else []
    return outdated


def _read_test_results(root: Path, words: Sequence[str], seeds: Sequence[int]) -> dict[str, Any]:
    """Return test accuracies of the runs of these seeds, each at its best validation round; nan
    where one diverged.
    """
    found: dict[str, list[float]] = {name: [] for name in JUDGED}
    diverged = 0
    for place in find_run_directories(root, words, seeds):
        status = load.read_started_run(place).status
        if status not in ("finished", "diverged"):
            raise FedpflError(f"{place}: {status}; the same command tries it again")
        lost = status == "diverged"
        diverged += lost
        row = {} if lost else best_round(load.read_run(place).evaluations)
        for name in found:
            found[name].append(float(row.get(name, float("nan"))))
    told = {name: mean_and_std(values) for name, values in found.items()}
    return {"seeds": len(seeds) - diverged} | {
        f"{name}{suffix}": value[at]
        for name, value in told.items()
        for at, suffix in enumerate(("", "_seed_std"))
    }


def draw(found: trials.SearchResult, folder: Path, method: str) -> None:
    """Draw how the search went and what mattered, into `<method>_history.png` and
    `<method>_importance.png`.
    """
    mpl = drawing.load_matplotlib()
    mpl.use("agg")
    import optuna
    from matplotlib import pyplot as plt
    from optuna.visualization import matplotlib as figures

    whole = [
        trial for trial in found.study.trials if trial.state == optuna.trial.TrialState.COMPLETE
    ]
    drawn: dict[str, Callable[[], Any]] = {
        "history": lambda: figures.plot_optimization_history(
            found.study, target_name="validation accuracy (%)"
        )
    }
    if len({trial.value for trial in whole}) > 1:
        drawn["importance"] = lambda: figures.plot_param_importances(found.study)
    for name, make in drawn.items():
        # Optuna chooses a style for the whole process.
        with mpl.rc_context(), warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            make()
            plt.tight_layout()
            plt.savefig(folder / f"{method}_{name}.png", dpi=150)
            plt.close("all")
