"""Check methods of your own: `fedpfl check my_method.py` tries on a tiny federation what every method must keep to.

Exit status: 0 all is kept, 1 something is not, 2 the command or the file is to be mended.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import yaml

from fedpfl.config import plugins
from fedpfl.engine.contract import PROMISES, audit
from fedpfl.ground.checks import typed
from fedpfl.ground.errors import FedpflError, brief, printable
from fedpfl.ground.terminal import Parser, outlive_readers, tell
from fedpfl.methods import METHODS, Method


def main(words: list[str] | None = None) -> int:
    """Print, for each method of a file, a line for each promise; return the exit status."""
    parser = Parser(
        prog="fedpfl check",
        description="Try your own methods on a tiny federation, on both backends, for what every method must keep to. "
        "A line for each: ok, or what is wrong, by how much, and what to do.",
    )
    parser.add_argument("file", help="a Python file with a dictionary METHODS (docs/extend.md)")
    parser.add_argument("values", nargs="*", metavar="KEY=VALUE", help="hyperparameters in place of the defaults")
    parser.add_argument("--quick", action="store_true", help="try each promise on one of the backends")
    chosen, threads = parser.parse_intermixed_args(words), torch.get_num_threads()
    try:
        plugins.load([])
        before = set(METHODS)
        plugins.load([chosen.file])
        own = [name for name in METHODS if name not in before]
        if not own:
            raise FedpflError(f"{chosen.file} has no methods; it needs a dictionary METHODS of names and classes")
        made = {name: _made(name, chosen.values) for name in own}
        return int(sum(_told(name, method, chosen.quick) for name, method in made.items()) > 0)
    except FedpflError as error:
        tell(error)
        return 2
    finally:
        torch.set_num_threads(threads)


def _made(name: str, values: list[str]) -> Method:
    """Return the method by values such as `share=0.5`, and its defaults. Raises FedpflError."""
    given: dict[str, Any] = {}
    for word in values:
        key, _, text = word.partition("=")
        try:
            given[key] = yaml.safe_load(text)
        except yaml.YAMLError:
            raise FedpflError(f"{word}: its value cannot be read") from None
    try:
        return typed(METHODS[name], given, "")
    except FedpflError as error:
        raise FedpflError(f"method={name}: {error}") from None


def _told(name: str, method: Method, quick: bool) -> int:
    """Print what the method keeps and what not; return how much it does not."""
    print(f"method={name}")
    wrong = 0
    for promise, faults, mend in audit(method, quick):
        word = "ok" if not faults else "WRONG" if promise.binding else "note"
        print(f"  {word:6}{promise.words}", flush=True)
        for fault in faults:
            print(f"        {printable(brief(fault))}")
        if mend:
            print(f"        {mend}")
        wrong += bool(faults) and promise.binding
    print(f"  {wrong} of {len(PROMISES)} not kept" if wrong else "  all is kept")
    return wrong


if __name__ == "__main__":
    outlive_readers()
    sys.exit(main())
