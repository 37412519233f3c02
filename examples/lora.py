"""Personalize a trained network by low-rank additions, and send those alone: `python examples/lora.py`.

Weights from elsewhere serve as well: model=vit_small model.weights=vit_small.safetensors.
"""

import fedpfl

SETTINGS = ["dataset=digits", "model=mlp", "clients=10", "participation=0.5", "local.lr=0.05"]
LORA = ("adapter=lora", "adapter.layers=[linear]", "adapter.rank=4")

# ---- Step 1: a network that all clients have trained together.
start = fedpfl.run(*SETTINGS, "method=fedavg", "name=start", rounds=10, progress=False)
print(f"FedAvg: {start.rounds['accuracy'].iloc[-1]:.2f} %")

# ---- Step 2: it is frozen; additions and heads train on. FedSA-LoRA keeps one factor of each at home.
for method in ("fedavg", "fedsa_lora"):
    words = [f"method={method}", f"model.weights={start.path}", *LORA]
    run = fedpfl.run(*SETTINGS, *words, rounds=5, progress=False)
    megabytes = run.rounds["bits_up"].sum() / 8e6
    print(
        f"{method} with LoRA: {run.rounds['accuracy'].iloc[-1]:.2f} %, {megabytes:.2f} MB sent up"
    )
