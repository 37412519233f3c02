"""Hear of a run while it goes on, and end it: `python examples/callback.py`."""

import fedpfl


class Best(fedpfl.Callback):
    """Keep the best accuracy so far in the run directory, in best.txt."""

    def on_begin(self, run):
        self.file, self.best = run.path / "best.txt", 0.0

    def on_round(self, round):
        accuracy = round.row["accuracy"]  # None where nobody was evaluated
        if accuracy is not None and accuracy > self.best:
            self.best = accuracy
            self.file.write_text(f"round {round.row['round']}: {accuracy:.2f} %\n")


# ---- Step 1: a callback hears of everything and decides nothing.
settings = (
    "method=fedavg",
    "model=mlp",
    "clients=10",
    "participation=0.5",
    "rounds=6",
    "eval.every=1",
)
for done in fedpfl.rounds(*settings, callbacks=[Best()]):
    # ---- Step 2: whoever iterates may stop; the same settings go on from there.
    if done.row["accuracy"] > 50:
        break

# ---- Step 3: the run goes on to its end, with the rounds that it would have had.
run = fedpfl.run(*settings, progress=False)
print(run.status, "after round", run.round)
print((run.path / "best.txt").read_text(), end="")
