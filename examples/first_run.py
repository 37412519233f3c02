"""Train one method and look at what it left: `python examples/first_run.py`."""

import fedpfl

# ---- Step 1: ten clients of scikit-learn's digits, unlike each other; nothing is downloaded.
run = fedpfl.run(
    "method=fedobp", "dataset=digits", "model=mlp", clients=10, participation=0.5, rounds=10
)
print(run)

# ---- Step 2: accuracies, in percent, by round and by client.
print(run.rounds[["round", "train_loss", "cohort_after"]].tail(3).to_string(index=False))
print(run.clients["accuracy"].sort_values().round(1).to_string())

# ---- Step 3: client 7's personal model, and which of its entries are personal.
images, labels = run.samples(7)
predicted = run.predict(7, images).argmax(1)
print("client 7 is right on", int((predicted == labels).sum()), "of", len(labels))
print({name: int(mask.sum()) for name, mask in run.mask(7).items()})
