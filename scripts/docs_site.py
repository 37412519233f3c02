"""Make the pages of the site that nobody writes by hand; mkdocs.yml names this file as a hook.

README.md and its like become pages, and what a page links to outside of docs/ is copied beside it.
From conf/, the columns, the commands' --help and docs/methods.md come reference pages, one for
each method among them.
"""

from __future__ import annotations

import csv
import inspect
import os
import posixpath
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

WRITTEN = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "tests/README.md": "tests.md",
    "examples": "examples.md",
}
"""Files and folders outside of docs/ that are pages, each with its page."""
LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)#\s]+)(?=[)#])")
BOARD = ROOT / "docs/results/board_small.csv"
ORACLES = ROOT / "docs/results/oracles.csv"
ARXIV = re.compile(r"arXiv: ?(\d{4}\.\d{4,5})")
API = {
    "Runs": [
        *(f"fedpfl.runner.library.{name}" for name in ("run", "rounds", "sweep", "load")),
        "fedpfl.runner.library.Trained",
    ],
    "Models of a run": ["fedpfl.runner.models.Models"],
    "Callbacks": ["fedpfl.record.callbacks.Callback"],
    "The contract of a method": ["fedpfl.methods.shared.method"],
    "Trees": ["fedpfl.ground.tree"],
    "Promises in your tests": ["fedpfl.testing.parametrize.parametrize_with_promises"],
}
"""What programs may call, by heading."""


def resolve_link(page: str, target: str) -> str:
    """Return where a link of a page leads on the site.

    Args:
        page: path of the page's source in the repository.
        target: as the page has it, relative to it.

    Returns:
        A path in the site's sources: a page, or a copy in source/ of what is no page.
    """
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
    if path in WRITTEN:
        return WRITTEN[path]
    if (ROOT / path).is_dir():
        path += "/index.md"
    return path.removeprefix("docs/") if path.startswith("docs/") else f"source/{path}"


def adapt_links(page: str, text: str) -> str:
    """Return a page's text with its links as the site has them."""
    place = posixpath.dirname(resolve_link("", page))

    def replace(match: re.Match[str]) -> str:
        return posixpath.relpath(resolve_link(page, match[1]), place or ".")

    return LINK.sub(replace, text)


def list_targets() -> set[str]:
    """Return what pages link to and mkdocs does not find: files outside of docs/, and folders."""
    pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / name for name in WRITTEN)]
    found = set()
    for page in pages:
        if page.is_file():
            name = page.relative_to(ROOT).as_posix()
            targets = (resolve_link(name, target) for target in LINK.findall(page.read_text()))
            found |= {
                path for path in targets if path.startswith("source/") or path.endswith("/index.md")
            }
    return found


def make_pages() -> Iterator[tuple[str, str]]:
    """Yield the path and the text of each page that is not in docs/."""
    for name, page in WRITTEN.items():
        if (ROOT / name).is_file():
            yield page, adapt_links(name, (ROOT / name).read_text())
    yield "examples.md", make_examples_page()
    yield "configuration.md", make_configuration_page()
    yield "columns.md", make_columns_page()
    yield "commands.md", make_commands_page()
    yield "api.md", make_api_page()
    yield "tables.md", make_tables_page()
    yield from make_method_pages()


def list_folder(folder: Path) -> str:
    """Return a page that leads to each file of a folder."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    return f"# {folder.relative_to(ROOT)}\n\n" + "\n".join(f"- [{name}]({name})" for name in names)


def make_examples_page() -> str:
    """Show each script of examples/ under its docstring's first sentence."""
    parts = ["# Examples\n\nScripts of `examples/`, each of which runs in seconds on a CPU."]
    for path in sorted((ROOT / "examples").glob("*.py")):
        parts.append(f"## {path.stem}\n\n```python\n{path.read_text().strip()}\n```")
    return "\n\n".join(parts)


def make_configuration_page() -> str:
    """List every file of conf/ with its keys, their defaults and comments."""
    parts = [
        "# Configuration\n\nEach group is a folder of `conf/`, each choice a file in it. A key's comment says what it is"
        " for; `python -m fedpfl.train method=NAME --help` adds types and ranges."
    ]
    parts.append(f"## All runs\n\n```yaml\n{(ROOT / 'conf/train.yaml').read_text().strip()}\n```")
    for folder in sorted((ROOT / "conf").iterdir()):
        if folder.is_dir() and folder.name not in ("experiment", "paper", "method"):
            parts.append(f"## {folder.name}")
            for path in sorted(folder.glob("*.yaml")):
                parts.append(
                    f"### {folder.name}={path.stem}\n\n```yaml\n{path.read_text().strip()}\n```"
                )
    return "\n\n".join(parts)


def make_columns_page() -> str:
    """List the columns of rounds.csv by scope."""
    from fedpfl.record.columns import METRICS

    rows = ["| column | meaning | of runs with |", "|---|---|---|"]
    for metric in METRICS.values():
        rows.append(
            f"| `{metric.name}` | {metric.label} | {metric.option or 'any'} |".replace(
                "|update|", "update"
            )
        )
    head = "[Files of a run](run_directory.md#roundscsv) explains them by group."
    return f"# Columns of rounds.csv\n\n{head}\n\n" + "\n".join(rows)


def make_commands_page() -> str:
    """Show what `--help` of each command prints."""
    from fedpfl.__main__ import COMMANDS

    parts = ["# Commands"]
    lines = [["report", name] for name in list_report_commands()]
    for words in [[], *([name] for name in COMMANDS), *lines]:
        text = ask_help(words)
        parts.append(f"## {' '.join(['fedpfl', *words])}\n\n```text\n{text}\n```")
    return "\n\n".join(parts)


def list_report_commands() -> list[str]:
    """Return the names of the report's commands."""
    from fedpfl.report.__main__ import COMMANDS

    return list(COMMANDS)


def ask_help(words: list[str]) -> str:
    """Return what a command's --help prints, without colours and in 100 columns."""
    line = [sys.executable, "-m", "fedpfl", *words, "--help"]
    variables = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(line, capture_output=True, text=True, env=variables, check=True)
    return done.stdout.strip()


def make_api_page() -> str:
    """Name what mkdocstrings describes."""
    parts = ["# API\n\nWhat programs may call, from the docstrings. `import fedpfl` has the runs."]
    for title, names in API.items():
        parts.append(f"## {title}")
        parts += [f"::: {name}\n    options: {{heading_level: 3}}" for name in names]
    return "\n\n".join(parts)


LONGEST_TABLE = 40
"""Rows of a file of results that the site shows; longer files are linked."""


def make_tables_page() -> str:
    """Show the tables of results: those that scripts/reproduction.py makes, and short files."""
    import reproduction

    parts = ["# All results\n\nIn percent, unless a column says another unit."]
    for name, make_table in reproduction.SITE_TABLES.items():
        parts.append(f"## {name.capitalize()}\n\n{make_table()}")
    for path in sorted((ROOT / "docs/results").glob("*.csv")):
        titles, *rows = list(csv.reader(path.open(newline="")))
        table = f"{len(rows)} rows: [{path.name}](results/{path.name})"
        if len(rows) <= LONGEST_TABLE:
            table = reproduction.markdown(titles, rows)
        parts.append(f"## {path.stem}\n\n{table}")
    return "\n\n".join(parts)


def make_method_pages() -> Iterator[tuple[str, str]]:
    """Yield a page for each method."""
    from fedpfl import methods
    from fedpfl.methods.shared.method import Method

    functions = [name for name, value in vars(Method).items() if inspect.isfunction(value)]
    hooks = [name for name in functions if not name.startswith("_")]
    counted = read_counted_rows()
    for name, method in methods.METHODS.items():
        yield f"methods/{name}.md", make_method_page(name, method, hooks, counted)


def read_counted_rows() -> dict[str, dict[str, str]]:
    """Return the rows of docs/results/methods.csv, by method."""
    import methods_table

    return {row["method"]: row for row in methods_table.read_costs()}


def make_method_page(
    name: str, method: Any, hooks: list[str], counted: dict[str, dict[str, str]]
) -> str:
    """Describe a method: paper, equations, hooks, keys, costs beside FedAvg's, oracles, the board.

    Args:
        name: of its configuration.
        method: its class.
        hooks: of the contract.
        counted: rows of the table of methods.
    """
    # ---- Step 1: from the class and the configuration.
    yaml_text = (ROOT / f"conf/method/{name}.yaml").read_text().strip()
    title = re.search(r"^title: (.+?)(?: #.*)?$", yaml_text, re.MULTILINE)
    heading = title[1] if title else name
    bases = [base for base in method.__mro__ if base.__module__.startswith("fedpfl.methods")]
    overridden = [hook for hook in hooks if getattr(method, hook) is not getattr(bases[-1], hook)]
    parts = [
        f"# {heading}\n\n`method={name}` in `fedpfl/methods/{name}.py`.",
        link_papers(describe_class(method)),
        f"## Keys\n\nThese are the defaults, with what each is for.\n\n```yaml\n{yaml_text}\n```",
        "## Hooks\n\nIt overrides these hooks of FedAvg ([what each is for](../design.md#a-method)): "
        + (", ".join(f"`{hook}`" for hook in overridden) or "none")
        + ".",
    ]

    # ---- Step 2: what it costs, beside FedAvg.
    rows = [
        f"| {key} | {value} | {counted['fedavg'][key]} |" for key, value in counted[name].items()
    ]
    table = "\n".join([f"| | {heading} | FedAvg |", "|---|---|---|", *rows[1:]])
    parts.append(
        "## What travels, what is kept, what the server sees\n\nValues per client and round for cnn4"
        f" ([how counted](../methods.md)).\n\n{table}"
    )

    # ---- Step 3: what was measured.
    oracle_rows = [row for row in csv.DictReader(ORACLES.open()) if row["method"] == name]
    parts += make_oracle_section(oracle_rows)
    board_rows = list(csv.DictReader(BOARD.open()))
    parts += make_board_section(heading, board_rows)
    return "\n\n".join(parts)


def link_papers(text: str) -> str:
    """Return a docstring with its arXiv numbers as links, outside of what is laid out."""
    prose, block, rest = text.partition("```")
    return ARXIV.sub(r"[arXiv:\1](https://arxiv.org/abs/\1)", prose) + block + rest


def make_oracle_section(rows: list[dict[str, str]]) -> list[str]:
    """Return what public code makes of a method, and the largest difference to it; or nothing.

    Args:
        rows: of docs/results/oracles.csv.
    """
    if not rows:
        return ["## Public code\n\nIt was compared only with a plain loop written from its paper."]
    titles = ("setting", "public code", "undone in it", "difference, loop", "batched")
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for row in rows:
        differences = [format_difference(row[key]) for key in ("loop", "batched")]
        cells = (row["setting"], row["repository"], row["undone"], *differences)
        lines.append("| " + " | ".join(cells) + " |")
    return [
        "## Public code\n\nThe largest difference of any entry of any model after any round, once"
        " the code's departures from the method are corrected ([how](../oracles.md)).\n\n"
        + "\n".join(lines)
    ]


def format_difference(text: str) -> str:
    """Return a difference with one digit; nothing where none was measured."""
    return f"{float(text):.0e}".replace("0e+00", "0") if text else ""


def make_board_section(title: str, board_rows: list[dict[str, str]]) -> list[str]:
    """Return a method's rows of the board, each with FedAvg's simulated time; or nothing.

    Args:
        title: of the method in tables.
        board_rows: of docs/results/board_small.csv.
    """
    fedavg_seconds = {
        row["setting"]: float(row["sim_seconds"]) for row in board_rows if row["method"] == "FedAvg"
    }
    titles = ("setting", "rank", "mean", "fine-tuned", "newcomers, fine-tuned", "harmed, %")
    titles += ("time, x FedAvg", "chosen")
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for row in board_rows:
        if row["method"] != title or not row["accuracy"]:
            continue
        keys = ("accuracy", "ft_accuracy", "unseen_ft_accuracy", "harmed_fedavg")
        numbers = [f"{float(row[key]):.2f}" if row[key] else "" for key in keys]
        ratio = float(row["sim_seconds"]) / fedavg_seconds[row["setting"]]
        setting = row["setting"].partition(": ")[2]
        cells = (setting, row["rank"], *numbers, f"{ratio:.2f}", f"`{row['chosen'] or 'nothing'}`")
        lines.append("| " + " | ".join(cells) + " |")
    if len(lines) == 2:
        return []
    return [
        "## On the board\n\nMeans over seeds, in percent. *Harmed* are clients that FedAvg+FT serves"
        " better; *time* is that of a simulated round ([the board](../board.md)).\n\n"
        + "\n".join(lines)
    ]


def describe_class(method: Any) -> str:
    """Return a class's docstring: the first paragraph as prose, the rest as it is laid out."""
    sentence, _, rest = inspect.getdoc(method).partition("\n\n")
    return sentence + (f"\n\n```\n{rest.strip()}\n```" if rest.strip() else "")


def on_startup(**_options: Any) -> None:
    """Let this file import the package and its neighbours (called by mkdocs)."""
    sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]


def on_files(files: Any, config: Any) -> Any:
    """Add what is made or copied to the site (called by mkdocs)."""
    from mkdocs.structure.files import File, InclusionLevel

    for path, text in make_pages():
        in_menu = (
            InclusionLevel.NOT_IN_NAV if path.startswith("methods/") else InclusionLevel.INCLUDED
        )
        files.append(File.generated(config, path, content=text, inclusion=in_menu))
    hidden = {"inclusion": InclusionLevel.NOT_IN_NAV}
    for path in sorted(list_targets()):
        source = ROOT / (
            path.removeprefix("source/") if path.startswith("source/") else f"docs/{path}"
        )
        if source.is_file():
            files.append(File.generated(config, path, abs_src_path=str(source), **hidden))
        elif source.parent.is_dir():
            files.append(File.generated(config, path, content=list_folder(source.parent), **hidden))
            for file in sorted(source.parent.iterdir()):
                if file.is_file() and path.startswith("source/"):
                    copy = posixpath.join(posixpath.dirname(path), file.name)
                    files.append(File.generated(config, copy, abs_src_path=str(file), **hidden))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Adapt the links of a page of docs/, and lead from the table to each method (called by mkdocs).

    Blocks of `text`, which are columns, get a class, by which site.css tells them from commands.
    """
    markdown = markdown.replace("```text\n", "```{.text .columns}\n")
    if page.file.generated_by:
        return markdown
    text = adapt_links(f"docs/{page.file.src_uri}", markdown)
    if page.file.src_uri == "methods.md":
        text = re.sub(r"^\| `\w+`.*? \|", link_methods, text, flags=re.MULTILINE)
    return text


def link_methods(cell: re.Match[str]) -> str:
    """Return the first cell of a row of the table with a link from each method."""
    return re.sub(r"`(\w+)`", r"[`\1`](methods/\1.md)", cell[0])
