"""Draw accuracy over rounds for all runs below outputs/, one PNG and PDF per data set and partition.

python scripts/figures.py                                         # outputs/figures/
python scripts/figures.py outputs/fmnist --out figures
python scripts/figures.py outputs/fmnist --reference published.csv  # with the cohort's curves beside published ones
"""

import sys

from fedpfl.report.__main__ import main

if __name__ == "__main__":
    raise SystemExit(main(["figures", *sys.argv[1:]]))
