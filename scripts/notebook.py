"""Execute a notebook's cells without Jupyter: `python scripts/notebook.py [--write]`.

Prints what each cell of docs/library.ipynb gives, from a scratch folder; `--write` keeps it in the
notebook.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PATH = Path(__file__).resolve().parents[1] / "docs" / "library.ipynb"


def played(path: Path, folder: Path) -> Iterator[str]:
    """Yield what each code cell prints on stdout, with the value of its last expression, as in a
    session.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(code(json.loads(path.read_text()))):
        body = ast.parse("".join(cell["source"])).body
        last = ast.Expression(body.pop().value) if isinstance(body[-1], ast.Expr) else None
        out = io.StringIO()
        with contextlib.chdir(folder), contextlib.redirect_stdout(out):
            exec(compile(ast.Module(body, []), f"cell {number}", "exec"), names)
            value = eval(compile(last, f"cell {number}", "eval"), names) if last else None
        yield out.getvalue() + ("" if value is None else repr(value))


def code(book: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the cells that hold code."""
    return [cell for cell in book["cells"] if cell["cell_type"] == "code"]


def main() -> None:
    """Run the command."""
    book = json.loads(PATH.read_text())
    with tempfile.TemporaryDirectory() as folder:
        for number, (cell, text) in enumerate(
            zip(code(book), played(PATH, Path(folder)), strict=True), 1
        ):
            print(f"[{number}] {text}")
            data = {
                "data": {"text/plain": text.splitlines(keepends=True)},
                "metadata": {},
                "execution_count": number,
            }
            cell |= {
                "execution_count": number,
                "outputs": [{"output_type": "execute_result", **data}] if text else [],
            }
    if "--write" in sys.argv[1:]:
        PATH.write_text(json.dumps(book, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
