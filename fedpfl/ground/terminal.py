"""What all commands share: how they read words, and one line on standard error for what is wrong."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

from fedpfl.ground.errors import brief, printable


def tell(text: object) -> None:
    """Print one line for the user where it does not mix with results."""
    print(f"fedpfl: {printable(brief(str(text)))}", file=sys.stderr, flush=True)


class Parser(argparse.ArgumentParser):
    """Read a command's words, and refuse them in one line, as everything is refused."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and end the process with status 2."""
        tell(f"{message}; {self.prog} --help tells what it takes")
        sys.exit(2)
