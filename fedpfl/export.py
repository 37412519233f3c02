"""Export a run: its personal models as files, one for each client, or its record to loggers.

Or a configuration as a Flower app, for `flwr run` (docs/federation.md).
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from fedpfl.config.overrides import read_list_value
from fedpfl.config.plan import check_config
from fedpfl.ground import answer
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.terminal import Parser, outlive_readers, print_notice
from fedpfl.record.loggers import make_loggers
from fedpfl.remote import app, flower_app
from fedpfl.runner.export import WRITERS, send_to_loggers, write_models
from fedpfl.runner.library import Trained, load, read_logger_options

USAGE = """python -m fedpfl.export [--format FORMAT] [--finetuned] [--clients NAME,...]
                               [--baseline DIRECTORY] [--license ID] [--data-dir DIR] DIRECTORY OUT [plugins=[FILE,...]]
       python -m fedpfl.export DIRECTORY ... logger=NAME [logger.KEY=VALUE ...]
       python -m fedpfl.export --flower DIR KEY=VALUE ...  (words of fedpfl.federate)"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0, or 2 for a mistake of the user's."""
    parser = _make_export_parser()
    options = parser.parse_intermixed_args(argv)

    # ---- Step 1: one of three; options of another are refused, not ignored.
    model_options = [
        f"--{name.replace('_', '-')}"
        for name in ("data_dir", "clients", "baseline", "format", "finetuned", "license")
        if getattr(options, name) != parser.get_default(name)
    ]
    logger_words = [word for word in options.words if word.startswith(("logger=", "logger."))]
    plugin_words = [word for word in options.words if word.startswith("plugins=")]
    paths = [Path(word) for word in options.words if word not in (*logger_words, *plugin_words)]
    if model_options and (options.flower or logger_words):
        parser.error(f"{model_options[0]} is for a run's models; leave it out")

    # ---- Step 2: export.
    try:
        if options.flower:
            return _write_flower_app(options.flower, options.words)
        if logger_words and paths:
            return _send_records(paths, logger_words)
        if logger_words or len(paths) != 2:
            parser.error("give a DIRECTORY and OUT, or one DIRECTORY or more and logger=...")
        run_path, output = paths
        _export_models(run_path, output, read_list_value(plugin_words, "plugins"), options)
    except FedpflError as error:
        print_notice(error)
        return 2
    return 0


def _make_export_parser() -> Parser:
    parser = Parser(prog="python -m fedpfl.export", usage=USAGE, description=__doc__)
    parser.add_argument(
        "words",
        metavar="WORD",
        nargs="*",
        help="OUT: a new folder (client0.pt, client1.pt, ...); plugins, logger: as in training",
    )
    parser.add_argument(
        "--data-dir",
        metavar="DIR",
        default="",
        help="where the data are, if not where the run had them",
    )

    # ---- Of models
    parser.add_argument(
        "--format",
        choices=WRITERS,
        default="pt",
        help="of the models: pt (a state_dict, default), safetensors, peft (of adapter=lora), or modules that stand alone "
        "and take samples as the data set holds them: torchscript, pt2, onnx, mlflow",
    )
    parser.add_argument("--finetuned", action="store_true", help="the models after fine-tuning")
    parser.add_argument(
        "--clients", metavar="NAME,...", default="", help="numbers or names; default: all"
    )
    parser.add_argument(
        "--baseline", metavar="DIRECTORY", help="a run of FedAvg, fine-tuned, for README.md"
    )

    parser.add_argument(
        "--license", metavar="ID", default="", help="of the models, for README.md, such as mit"
    )

    # ---- Of a federation
    parser.add_argument(
        "--flower", metavar="DIR", type=Path, help="a new folder, for a Flower app of the words"
    )
    return parser


def _export_models(
    run_path: Path, output: Path, plugin_files: Sequence[str], options: argparse.Namespace
) -> None:
    """Write personal models into a new folder. Raises FedpflError."""
    run = load(run_path, "cpu", options.data_dir, plugin_files)
    baseline = load(options.baseline, "cpu") if options.baseline else None
    clients = _split_clients(run, options.clients)
    count = write_models(
        run=run,
        out=output,
        format_name=options.format,
        clients=clients,
        baseline=baseline,
        finetuned=options.finetuned,
        license=options.license,
    )
    answer.add_facts(files=[*output.iterdir()])
    print(f"wrote {count} models to {output}")


def _send_records(run_paths: Sequence[Path], logger_words: Sequence[str]) -> int:
    """Send runs' records to loggers; return the exit status. Raises FedpflError for loggers."""
    loggers = read_logger_options(logger_words)
    if not make_loggers(loggers):
        raise FedpflError(
            f"{' '.join(logger_words)} logs nothing beside the run directory; choose others"
        )
    status = 0
    for path in run_paths:
        # A run that cannot be sent holds up no other.
        try:
            print(f"logged {send_to_loggers(load(path), loggers)} rounds of {path}")
        except FedpflError as error:
            print_notice(error)
            status = 2
    return status


def _split_clients(run: Trained, text: str) -> list[int | str] | None:
    """Return the clients that --clients lists, numbers and names; None for all of them."""
    if not text:
        return None
    names = set(run.client_names.values())
    if text in names:  # which may hold a comma
        return [text]
    words = [word.strip() for word in text.split(",")]
    return [int(word) if word.isdecimal() and word not in names else word for word in words]


def _write_flower_app(folder: Path, words: Sequence[str]) -> int:
    """Write a Flower app; return the exit status. Raises FedpflError."""
    check_config(app.compose_federation(words)[1])
    flower_app.write_app(folder, words)
    print(
        f"wrote a Flower app to {folder}; flwr run {shlex.quote(str(folder))} starts it on your"
        " SuperLink"
    )
    return 0


if __name__ == "__main__":
    outlive_readers()
    answer.run_command(main)
