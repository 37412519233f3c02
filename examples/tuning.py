"""Tune two methods on equal terms, and judge them by fresh seeds: `python examples/tuning.py`.

The same as `fedpfl tune` with these words; needs `pip install -e '.[tune]'`.
"""

import sys

import pandas as pd

from fedpfl import tune

WORDS = "method=fedper,fedprox dataset=digits model=mlp clients=10 participation=0.5 rounds=3 trials=3 seeds=2"

# ---- Step 1: as many trials for each, chosen by validation samples; test samples are not looked at.
sys.argv[1:] = WORDS.split()
tune.main()

# ---- Step 2: what was chosen, and its accuracy with seeds that the search has not seen.
tuned = pd.read_csv("outputs/tune/tuned.csv")
print(tuned[["method", "chosen", "validation", "accuracy"]])
