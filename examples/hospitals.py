"""Write hospitals/, the data of six hospitals that differ, as CSV files with a patient a row.

The patients are those of the Wisconsin breast cancer data (scikit-learn has them). Each hospital
sees tumours of other sizes, so that the share of malignant ones is not the same anywhere.
"""

from pathlib import Path

import numpy as np
from sklearn.datasets import load_breast_cancer

HOSPITALS = 6


def write_hospitals(folder: Path) -> None:
    """Write a CSV file per hospital into a folder."""
    data = load_breast_cancer(as_frame=True)
    patients = data.data.assign(diagnosis=np.where(data.target == 1, "benign", "malignant"))
    rng = np.random.default_rng(0)
    size = patients["mean radius"] + rng.normal(0, 2, len(patients))
    by_size = patients.iloc[size.argsort()]
    folder.mkdir(exist_ok=True)
    for number, rows in enumerate(np.array_split(np.arange(len(patients)), HOSPITALS), 1):
        by_size.iloc[rows].to_csv(folder / f"hospital_{number:02}.csv", index=False)


if __name__ == "__main__":
    write_hospitals(Path("hospitals"))
