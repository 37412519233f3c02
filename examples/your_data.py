"""From the tables of six hospitals to a model for one of them: `python examples/your_data.py`."""

from pathlib import Path

import pandas as pd
from hospitals import write_hospitals

import fedpfl

# ---- Step 1: a table per hospital; yours may come from anywhere.
write_hospitals(Path("hospitals"))
tables = {file.stem: pd.read_csv(file) for file in sorted(Path("hospitals").glob("*.csv"))}

# ---- Step 2: FedPer and, to compare, FedAvg with fine-tuning.
settings = {
    "dataset": {"label": "diagnosis"},
    "model": "mlp",
    "rounds": 20,
    "participation": 1.0,
    "eval": {"finetune_epochs": 5},
}
fedper = fedpfl.run("method=fedper", data=tables, progress=False, **settings)
fedavg = fedpfl.run("method=fedavg", data=tables, progress=False, **settings)
print(fedper.clients[["train", "test", "accuracy"]].assign(fedavg_ft=fedavg.clients["ft_accuracy"]))

# ---- Step 3: a hospital's own model answers raw rows of its table.
x, _ = fedper.samples("hospital_02")
predicted = fedper.predict("hospital_02", x[:3]).argmax(1)
print([fedper.classes[label] for label in predicted])
