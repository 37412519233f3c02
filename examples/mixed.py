"""Clients with networks of three kinds share prototypes: `python examples/mixed.py`."""

import fedpfl

SETTINGS = {
    "dataset": "digits",
    "clients": 9,
    "participation": 1,
    "rounds": 10,
    "model": "mixed",
    "model.features": 84,
}
KINDS = "model.kinds=[{name:mlp,hidden:[84]},lenet5,{name:mlp,hidden:[200,50]}]"

# ---- Step 1: each client alone, and with what others' prototypes or heads tell it.
for method in ("local_only", "fedproto", "lg_fedavg"):
    run = fedpfl.run(KINDS, f"method={method}", progress=False, **SETTINGS)
    clients = run.clients.groupby("kind")
    accuracy = clients["accuracy"].mean().round(1).to_dict()
    print(f"{method:11}", accuracy)

# ---- Step 2: what a kind costs: its parameters, and the bits that a client sends in a round.
print(clients[["parameters", "bits_up"]].mean().astype(int).to_string())

# ---- Step 3: client 1's own network, as plain PyTorch.
network = run.network(1)
network.load_state_dict(run.personal(1))
images, labels = run.samples(1)
print(
    "client 1 is right on",
    int((network.eval()(images).argmax(1) == labels).sum()),
    "of",
    len(labels),
)
