"""Log to Weights & Biases without an account: `python examples/wandb_offline.py`.

`wandb login`, then `wandb sync` and the folder that is printed, uploads the run later.
"""

import fedpfl

run = fedpfl.run(
    "method=fedper",
    "dataset=digits",
    "model=mlp",
    "logger=wandb",
    "logger.mode=offline",
    "logger.group=my first group",
    clients=10,
    rounds=5,
    progress=False,
)
(folder,) = (run.path / "wandb").glob("offline-run-*")
print("logged to", folder)
