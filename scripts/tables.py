"""Print the accuracy and cost table of all runs below outputs/, beside the published values.

python scripts/tables.py                                          # terminal
python scripts/tables.py outputs/fmnist --format markdown
python scripts/tables.py --out tables                             # Markdown, CSV and LaTeX files
python scripts/tables.py --select best-checkpoint --every 100     # the published round rule
"""

import sys

from fedpfl.report.__main__ import main

if __name__ == "__main__":
    raise SystemExit(main(["tables", *sys.argv[1:]]))
