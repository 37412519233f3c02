"""Heart Disease of UCI's repository: 920 patients of four clinics, with many empty cells."""

from __future__ import annotations

from dataclasses import replace

from fedpfl.data.datasets.shared.missing import Missing
from fedpfl.data.datasets.shared.parts import ReadOptions, join_parts, split_table
from fedpfl.data.datasets.shared.samples import Raw
from fedpfl.data.datasets.shared.source import Source, explain_read_errors, fetch_file

URL = "https://archive.ics.uci.edu/ml/machine-learning-databases/heart-disease/"
MD5 = {
    "cleveland": "2d91a8ff69cfd9616aa47b59d6f843db",
    "hungarian": "22e96bee155b5973568101c93b3705f6",
    "switzerland": "9a87f7577310b3917730d06ba9349e20",
    "va": "4249d03ca7711e84f4444768c9426170",
}
MEASURED = [
    *("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak"),
    *("slope", "ca", "thal"),
]
CATEGORIES = ("cp", "restecg", "slope", "thal")
NEVER_ZERO = ["trestbps", "chol"]  # pressure and cholesterol; a clinic wrote 0 for unknown


def heart_disease(source: Source, missing: Missing = "mean") -> Raw:
    """Read the four `processed.*.data` files (Janosi et al. 1988); groups are the clinics.

    Class 1 is any disease. missing: as in `sites`.
    """
    import pandas as pd

    options = ReadOptions(("disease",), CATEGORIES, missing=missing)
    parts = []
    for clinic, md5 in MD5.items():
        name = f"processed.{clinic}.data"
        path = fetch_file(source, f"heart_disease/{name}", (md5,), (f"{URL}{name}",))
        with explain_read_errors(path):
            table = pd.read_csv(path, header=None, names=[*MEASURED, "disease"], na_values="?")
        table["disease"] = (table["disease"] > 0).astype(int)
        table[NEVER_ZERO] = table[NEVER_ZERO].where(table[NEVER_ZERO] > 0)
        parts.append(replace(split_table(table, str(path), options), name=clinic))
    return join_parts(parts, options)
