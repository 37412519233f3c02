"""Make the tables of docs/robustness.md and docs/shift.md from docs/results/robust_fmnist.csv.

    python scripts/robustness.py [ROWS.CSV] [--write]

ROWS.CSV is what `python -m fedpfl.report tables ... --format csv` printed, all columns that COLUMNS
names. Prints the tables; with --write it keeps these rows and puts the tables between their marks.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

DOCS = Path(__file__).parents[1] / "docs"
ROWS_FILE = DOCS / "results" / "robust_fmnist.csv"
END = "<!-- to here -->"
COLUMNS = (
    *("accuracy", "accuracy_worst10", "asr", "asr_worst10"),
    *("ft_accuracy", "ft_accuracy_worst10", "ft_asr", "before_shift", "recovery", "seeds"),
    "status",
)
PARTITION = "Dir(0.1), "
ATTACKS = ("backdoor", "replacement")
SHOWN = ("Local-Only", "FedAvg", "FedPer", "kNN-Per", "FedOBP")
"""Methods of the page; the file has more, and more attacks."""
DEFENDED = ("FedAvg, multi_krum", "FedPer, median")
SHIFTS = {"permutation": "label_permutation", "rotation": "rotation=360.0, at=[20]"}
DRIFT_COLUMNS = ("before_shift", "accuracy", "accuracy_worst10", "recovery")

Rows = dict[tuple[str, str], pd.Series]
"""Rows of the report by method, and by what stands after the partition."""


def read_rows(path: Path) -> Rows:
    """Read the finished rows of a report's table."""
    frame = pd.read_csv(path)
    frame = frame[frame["status"] == "finished"]
    conditions = frame["partition"].str.removeprefix(PARTITION)
    keys = zip(frame["method"], conditions, strict=True)
    return {key: row for key, (_, row) in zip(keys, frame.iterrows(), strict=True)}


def format_attack(row: pd.Series | None) -> str:
    """Return accuracy (worst tenth) / attack success, and this after fine-tuning."""
    if row is None:
        return ""
    text = f"{row['accuracy']:.1f} ({row['accuracy_worst10']:.0f})"
    if math.isnan(row["asr"]):
        return text
    return f"{text} / {row['asr']:.1f} → {row['ft_asr']:.1f}"


def format_numbers(row: pd.Series | None, columns: Sequence[str]) -> list[str]:
    """Return a cell for each column, empty where nothing was recorded."""
    if row is None:
        return [""] * len(columns)
    return ["" if math.isnan(row[name]) else f"{row[name]:.1f}" for name in columns]


def join_rows(headings: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table without the rows that are empty."""
    filled_rows = [row for row in cells if any(row[1:])]
    lines = [headings, ["---"] * len(headings), *filled_rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def make_attack_tables(rows: Rows) -> str:
    """Return accuracy and attack success by attack, under the mean and under defences."""
    conditions = ["backdoor 0 %", *(f"{attack} 20 %" for attack in ATTACKS)]
    cells = []
    for method in SHOWN:
        cells.append([method, *(format_attack(rows.get((method, name))) for name in conditions)])
    for pair in DEFENDED:
        method, defence = pair.split(", ")
        defended = [rows.get((method, f"{name}, {defence}")) for name in conditions[1:]]
        cells.append([f"{method}, `{defence}`", "", *map(format_attack, defended)])
    return join_rows(["method", "no attack", *(f"`{attack}`" for attack in ATTACKS)], cells)


def make_shift_table(rows: Rows) -> str:
    """Return accuracies where classes are permuted, and where images turn during the run."""
    permutation_columns = ("accuracy", "accuracy_worst10", "ft_accuracy")
    cells = []
    for method in (*SHOWN, "pFedFDA", "IFCA"):
        permuted = rows.get((method, SHIFTS["permutation"]))
        turned = rows.get((method, SHIFTS["rotation"]))
        cells.append(
            [
                method,
                *format_numbers(permuted, permutation_columns),
                *format_numbers(turned, DRIFT_COLUMNS),
            ]
        )
    headings = ["method", "permuted: mean", "worst 10 %", "fine-tuned"]
    headings += ["drift: before", "at the end", "worst 10 %", "recovery, rounds"]
    return join_rows(headings, cells)


def replace_table(page: str, text: str) -> str:
    """Return the page with a text between its marks."""
    begin = "<!-- made by scripts/robustness.py -->"
    before, after_mark = page.split(begin)
    return f"{before}{begin}\n\n{text}\n\n{END}{after_mark.split(END, 1)[1]}"


TABLES = {"robustness.md": make_attack_tables, "shift.md": make_shift_table}
"""By page of docs/."""


def main() -> None:
    """Print the tables; put them and the given rows where they belong with --write."""
    should_write = "--write" in sys.argv
    paths = [Path(word) for word in sys.argv[1:] if word != "--write"]
    path = paths[0] if paths else ROWS_FILE
    rows = read_rows(path)
    if should_write and paths:
        ROWS_FILE.write_bytes(path.read_bytes())
    for name, make_text in TABLES.items():
        text = make_text(rows)
        print(text)
        if should_write:
            page = DOCS / name
            page.write_text(replace_table(page.read_text(), text))


if __name__ == "__main__":
    main()
