"""The language of the code gets no worse: the figures of each room may only fall."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from scripts.language import CEILINGS, FILLERS, measure_files, measure_rooms, show_where

NOTED = json.loads(CEILINGS.read_text())


@pytest.mark.usefixtures("without_collections")
def test_no_figure_of_a_room_has_risen():
    """Where one fell, `python scripts/language.py --write` lowers its ceiling.

    A broken ceiling names files and words.
    """
    rooms = measure_rooms()
    assert {*NOTED} == {*rooms}
    for room, ceilings in NOTED.items():
        measured = asdict(rooms[room])
        floor = ceilings["comment_lines"]
        assert measured["comment_lines"] >= floor - 0.05, f"comments of {room} have become fewer"
        for name in measured.keys() - {"comment_lines"}:
            slack = 0.05 if isinstance(measured[name], float) else 0
            if measured[name] > ceilings[name] + slack:
                where = "\n".join(show_where(room, name))
                pytest.fail(f"{name} of {room}: {measured[name]} for {ceilings[name]}\n{where}")


def test_the_figures_are_those_of_a_file_counted_by_hand(tmp_path: Path):
    file = tmp_path / "room.py"
    file.write_text(
        '"""A module."""\n'
        "# why\n"
        "def told(own, values):\n"
        '    """Say a sentence that goes on and on and on until nobody knows any more what it began'
        ' with."""\n'
        "    place = max(*own)\n"
        "    return place, values\n"
        "\n"
        "\n"
        "class Reader:\n"
        "    def read_all(self, name, a, b, c, d, e, f, g):\n"
        f"        self.name = {'1' * 90}\n"
    )
    figures = measure_files([file])
    assert {"told", "own", "place"} <= FILLERS
    # Names: own, values, place, name, a to g, self.name; definitions: told, Reader, read_all.
    assert figures.filler_names == round(100 * 2 / 12, 2)
    assert figures.filler_definitions == round(100 / 3, 2)
    assert figures.one_word_functions == 50
    assert (figures.wide_signatures, figures.starred_names, figures.long_sentences) == (1, 1, 1)
    assert figures.wide_lines == round(100 / 6, 2)
    assert figures.comment_lines == round(100 / 11, 2)
    assert (figures.long_functions, figures.shared_names) == (0, 0)
    # Words: 2 of the module, 1 of the comment, 19 of the function: "nobody" and "what it".
    assert figures.phrases == round(1000 * 2 / 22, 2)
    assert (figures.openings, figures.code_lines) == (0, 6)
