"""What is written into rounds.csv reads back as it was."""

import math

import numpy as np
import pytest
import torch

from fedpfl.record import rounds

VALUES = {"whole": 2**60 + 1, "below": -3, "third": 1 / 3, "tiny": 5e-324, "nothing": None}
VALUES |= {"numpy": np.float32(0.1), "torch": torch.tensor(7), 'a,"b"': 1.0}


def test_numbers_read_back_bit_for_bit():
    text = rounds.format_row(VALUES) + rounds.format_row(VALUES.values())
    (row,) = rounds.read_rows(text)
    assert row == VALUES | {"numpy": float(np.float32(0.1)), "torch": 7}
    assert [type(row[name]) for name in ("whole", "third", "torch")] == [int, float, int]
    (row,) = rounds.read_rows(rounds.format_row(["x"]) + rounds.format_row([math.nan]))
    assert math.isnan(row["x"])


def test_the_line_that_is_being_written_does_not_count():
    text = "round,accuracy\n1,50.0\n2,60.0\n"
    rows = [{"round": 1, "accuracy": 50.0}, {"round": 2, "accuracy": 60.0}]
    assert rounds.read_rows(text) == rounds.read_rows(text + "3,7") == rows
    assert rounds.read_rows(text[:-1]) == rows[:1]
    assert rounds.read_rows("round,accuracy\n") == []


REFUSED = {
    "": "it is empty",
    "round,accuracy": "it is empty",
    "round,accuracy\n1,50.0\n2\n": "row 2 has 1 cells, and there are 2 columns",
    "round\n1,50.0\n": "row 1 has 2 cells",
    "round,round\n1,1\n": "two columns have one name",
    "round,accuracy\n1,good\n": "'good' under accuracy is no number",
    f"round\n{'1' * 200_000}\n": "it is no CSV",
}


def test_what_is_no_table_of_numbers_is_refused():
    for text, message in REFUSED.items():
        with pytest.raises(ValueError, match=message):
            rounds.read_rows(text)
