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

NOTEBOOK = Path(__file__).resolve().parents[1] / "docs" / "library.ipynb"


def run_cells(path: Path, folder: Path) -> Iterator[str]:
    """Yield what each code cell prints on stdout, with the value of its last expression."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(code_cells(json.loads(path.read_text()))):
        statements = ast.parse("".join(cell["source"])).body
        last_expression = None
        if isinstance(statements[-1], ast.Expr):
            last_expression = ast.Expression(statements.pop().value)
        stdout = io.StringIO()
        value = None
        with contextlib.chdir(folder), contextlib.redirect_stdout(stdout):
            exec(compile(ast.Module(statements, []), f"cell {number}", "exec"), names)
            if last_expression:
                value = eval(compile(last_expression, f"cell {number}", "eval"), names)
        yield stdout.getvalue() + ("" if value is None else repr(value))


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the cells that hold code."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def main() -> None:
    """Run all cells; keep their outputs with --write."""
    notebook = json.loads(NOTEBOOK.read_text())
    with tempfile.TemporaryDirectory() as folder:
        texts = run_cells(NOTEBOOK, Path(folder))
        for number, (cell, text) in enumerate(zip(code_cells(notebook), texts, strict=True), 1):
            print(f"[{number}] {text}")
            output = {
                "output_type": "execute_result",
                "data": {"text/plain": text.splitlines(keepends=True)},
                "metadata": {},
                "execution_count": number,
            }
            cell["execution_count"] = number
            cell["outputs"] = [output] if text else []
    if "--write" in sys.argv[1:]:
        NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
