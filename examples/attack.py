"""A backdoor, and defences against it: `python examples/attack.py`."""

import fedpfl

SETTINGS = [
    "method=fedavg",
    "dataset=digits",
    "model=mlp",
    "clients=10",
    "participation=1",
    "rounds=10",
]
ATTACK = ("attack=backdoor", "attack.share=0.2")

# ---- Step 1: two of ten clients teach the network that a white patch means a zero.
print(f"{'defence':12}  accuracy  backdoor (%)")
for defence in ("mean", "median", "multi_krum"):
    run = fedpfl.run(*SETTINGS, *ATTACK, f"defence={defence}", progress=False)
    last = run.rounds.dropna(subset="accuracy").iloc[-1]
    # ---- Step 2: of honest clients: how many are right, and how many patched images are taken for zeros.
    print(f"{defence:12}  {last['accuracy']:8.2f}  {last['asr']:12.2f}")
