"""What privacy costs: `python examples/private.py`; needs `pip install -e '.[privacy]'`.

Every client hides each of its training samples by DP-SGD, from the server too.
"""

import fedpfl

settings = ["method=fedper", "dataset=digits", "model=mlp", "local.lr=0.1", "local.epochs=1"]
settings += ["clients=10", "participation=0.5", "rounds=5"]

# ---- Step 1: without, and with smaller and smaller epsilons: the smaller, the better hidden.
print("epsilon  accuracy")
plain = fedpfl.run(*settings, progress=False)
print(f"{'none':>7}  {plain.rounds['accuracy'].iloc[-1]:8.2f}")
for epsilon in (8, 0.5):
    run = fedpfl.run(*settings, "privacy=sample", privacy={"epsilon": epsilon}, progress=False)
    print(f"{epsilon:7}  {run.rounds['accuracy'].iloc[-1]:8.2f}")

# ---- Step 2: what each client has spent of its budget, whatever its number of samples.
print(run.clients[["train", "epsilon"]].round(3))
