"""Judge a submitted method by a contract, and add a line to a ledger (docs/arena.md).

    fedpfl arena contract.yaml mine.py [LEDGER]   # LEDGER: a file, by default arena.jsonl
    fedpfl arena verify LEDGER                    # judges each line's submission again, bit for bit

A system that cannot seal the processes of a submission runs it as any program of yours.
Exit status: 0 judged, or equal; 1 refused, or not equal; 2 the command, the contract or the system.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import yaml
from torch import Tensor

from fedpfl import __version__
from fedpfl.config import overrides
from fedpfl.config import run as config_run
from fedpfl.config.dealing import DealtData, Share, deal_data, share_nothing
from fedpfl.config.plan import Plan, check_config
from fedpfl.data import Federation
from fedpfl.ground import answer, seal
from fedpfl.ground.checks import build_dataclass
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.ranges import Count, Positive, WholeNumber
from fedpfl.ground.records import Record
from fedpfl.ground.tasks import CLASSIFICATION
from fedpfl.ground.terminal import outlive_readers, print_notice
from fedpfl.report.claims import decide_claim
from fedpfl.report.compare import paired_test
from fedpfl.runner import library
from fedpfl.runner.faults import run_guarded

COMMON_WORDS = ("engine=loop", "device=cpu", "system=simulated", "system.profile=uniform")
"""Words before the contract's; simulated time counts FLOPs."""
CHOSEN_WORD = re.compile(r"\b(?:method\.\w+|local\.lr|quantile\.q)=[\w.+-]+", re.ASCII)
"""A word that a search may choose; a stranger's process answers with it."""
BLATANT_SHARE = 90
"""Percent of false labels that no honest method predicts."""
# Sealed before anything imports torch, which starts threads.
SCRIPT = """import sys
from fedpfl.ground.seal import is_sealable, seal_process
folder = sys.argv.pop(1)
is_sealable() and seal_process(folder)
from fedpfl.__main__ import main
main()"""


class Refused(Exception):
    """A submission breaks the contract; the message says how."""


@dataclass(frozen=True)
class Contract:
    """Hold the rules for all submissions.

    Attributes:
        words: of fedpfl.train, for all runs: data, split, network, rounds.
        baseline: the method beside which a submission is judged.
        seeds: how many fresh ones.
        trials: of the search for each side's values; 0: they are the defaults.
        bits: that travel, down and up together: at most so many times the baseline's.
        flops: of training: at most so many times the baseline's.
    """

    words: list[str]
    baseline: str = "fedavg"
    seeds: Count = 5
    trials: WholeNumber = 0
    bits: Positive = 1.0
    flops: Positive = 1.0


def main() -> int:
    """Run the command; return the exit status."""
    return run_guarded(__doc__, sys.argv[1:], _run_words)


def _run_words(arguments: Sequence[str]) -> int:
    try:
        match [*arguments]:
            case ["play", *run_words]:
                return play_blindly(run_words)
            case ["verify", ledger]:
                return verify_ledger(Path(ledger))
            case [contract, file, *ledgers] if len(ledgers) < 2:
                target = Path(*ledgers or ("arena.jsonl",))
                return add_submission(Path(contract).read_text(), Path(file).read_text(), target)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise FedpflError(" ".join(str(error).split())) from None
    raise FedpflError("give CONTRACT.yaml FILE.py [LEDGER], or verify LEDGER")


# ---- the ledger


def add_submission(contract: str, code: str, ledger: Path) -> int:
    """Judge a submission and append its line to a ledger; return the exit status."""
    lines = ledger.read_text() if ledger.exists() else ""
    entry = judge_submission(contract, code, lines)
    # By another judge, or by a submission on a system that cannot seal.
    if lines != (ledger.read_text() if ledger.exists() else ""):
        raise FedpflError(f"{ledger} has changed while the submission ran; nothing was added")
    with ledger.open("a") as file:
        file.write(f"{json.dumps(entry)}\n")
    answer.add_facts(entries=[entry])
    if "refused" in entry:
        print_notice(f"refused: {entry['refused']}")
        return 1
    print(f"{entry['claim']}: {entry['difference']:+.2f} points, {entry['verdict']}")
    return 0


def verify_ledger(ledger: Path) -> int:
    """Judge a ledger's submissions again; return 0 if all lines are equal, else 1."""
    status, lines = 0, ""
    for number, line in enumerate(ledger.read_text().splitlines(), 1):
        entry = json.loads(line)
        new_entry = judge_submission(entry["contract"], entry["code"], lines)
        answer.add_facts(entries=[new_entry])
        # Not the new line: so each edit shows where it is, and in the digest of the next line.
        lines += f"{line}\n"
        names = {**entry, **new_entry}.keys() - {"versions", "sealed"}
        differences = sorted(name for name in names if entry.get(name) != new_entry.get(name))
        print(f"line {number}: {', '.join(differences) or 'equal'}")
        if differences:
            print_notice(f"{entry['versions']} there, {new_entry['versions']} here")
            status = 1
    return status


def _digest_text(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


# ---- judging


def judge_submission(contract_text: str, code: str, lines: str) -> Record:
    """Judge a submission; return its line for a ledger that has these lines. Raises FedpflError."""
    # ---- Step 1: seeds follow from the submission and all that was judged before it.
    if not seal.is_sealable():
        print_notice("this system cannot seal the processes of a submission (docs/arena.md)")
    contract = build_dataclass(Contract, yaml.safe_load(contract_text), "contract")
    digest, previous = _digest_text(code), _digest_text(lines)
    # Below 2**28, which all generators take.
    keys = range(contract.seeds)
    seeds = [int(_digest_text(f"{digest} {previous} {key}")[:7], 16) for key in keys]
    entry: Record = {
        "previous": previous,
        "contract": contract_text,
        "code": code,
        "digest": digest,
        "versions": f"fedpfl {__version__}, torch {torch.__version__}",
        "sealed": seal.is_sealable(),
    }

    # ---- Step 2: promises, then both sides with each seed.
    try:
        subjects = ask_process(code, ["check", "submission.py"])["subjects"]
        kind, _, name = subjects[0]["subject"].partition("=")
        if len(subjects) > 1 or kind != "method":
            raise Refused("a submission adds one method, and nothing beside it")
        rows = [*play_seeds(contract, code, name, seeds)]
    except Refused as reason:
        return {**entry, "refused": str(reason)}

    # ---- Step 3: the claim that it is better than the baseline.
    differences = [row[name]["accuracy"] - row[contract.baseline]["accuracy"] for row in rows]
    p = paired_test(differences, "t")
    judged = {
        "claim": f"{name} > {contract.baseline}",
        "difference": sum(differences) / len(rows),
        "p": p,
        "verdict": decide_claim(differences, 0, p, 1)[1],
        "rows": rows,
    }
    return answer.make_plain({**entry, **judged})


def play_seeds(contract: Contract, code: str, name: str, seeds: Sequence[int]) -> Iterator[Record]:
    """Yield the runs of both sides for each seed, by method. Raises Refused."""
    # ---- Step 1: the words of both sides, searched for on equal terms.
    sides: dict[str, list[str]] = {}
    for method, plugins in ((contract.baseline, "[]"), (name, "[submission.py]")):
        words = [f"method={method}", f"plugins={plugins}", *COMMON_WORDS, *contract.words]
        if contract.trials:
            search_words = (f"trials={contract.trials}", "seeds=1", "hydra.sweep.dir=tuned")
            (table,) = ask_process(code, ["tune", *words, *search_words])["tables"]
            # Other words could give it more rounds.
            words += CHOSEN_WORD.findall(table["rows"][0]["chosen"])
        sides[method] = words

    # ---- Step 2: a process for each run, so that none remembers another.
    for seed in seeds:
        federation = read_federation([*sides[contract.baseline], f"seed={seed}"])
        row: Record = {"seed": seed}
        for method, words in sides.items():
            (run,) = ask_process(code, ["arena", "play", *words, f"seed={seed}"])["plays"]
            row[method] = score_predictions(run, federation)
        for budget in ("bits", "flops"):
            share = row[name][budget] / row[contract.baseline][budget]
            if share > getattr(contract, budget):
                raise Refused(f"its {budget} are {share:.4g} times those of {contract.baseline}")
        yield row


def ask_process(code: str, words: Sequence[str]) -> Record:
    """Run a command in a new process and folder, which is then removed. Raises Refused."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "submission.py").write_text(code)
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, folder, *words, "--json"],
            # Nothing that it leaves is found by the next one.
            cwd=folder,
            env={"FEDPFL_DATA": os.path.abspath("data"), **os.environ, "TMPDIR": folder},
            capture_output=True,
        )
    try:
        # A submission may print, too; the answer is the last line.
        facts: Record = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        raise Refused("its process died without an answer") from None
    if "error" in facts:
        raise Refused(facts["error"]["message"].replace(folder, "."))
    return facts


# ---- a run in a process without the labels of test samples


def play_blindly(words: Sequence[str]) -> int:
    """Play a run on false labels of test samples, and answer with predictions for these.

    They are of fine-tuned models if the run fine-tunes any.
    """
    # This process plays one run, so nothing has to be put back.
    config_run.deal_data = deal_blindly
    run = library.run(*words, directory="run", progress=False)
    columns = run.rounds.drop(columns=["seconds", "eval_seconds"])
    is_finetuned = run.config["eval"]["finetune_epochs"] > 0
    predictions = []
    for client in range(len(run)):
        logits = run.predict(client, run.samples(client)[0], is_finetuned)
        predictions.append(logits.argmax(1).tolist())
    play = {
        "identity": run.summary["identity"],
        "digest": _digest_text(columns.to_csv(index=False)),
        "bits": columns["bits_down"].sum() + columns["bits_up"].sum(),
        "flops": columns["flops"].sum(),
        "predictions": predictions,
    }
    answer.add_facts(plays=[play])
    return 0


def deal_blindly(plan: Plan, share: Share) -> DealtData:
    """Deal samples to clients, the labels of test samples being false."""
    dealt = deal_data(plan, share)
    labels = falsify_labels(dealt.federation)
    return replace(dealt, federation=replace(dealt.federation, y=labels))


def falsify_labels(federation: Federation) -> Tensor:
    """Return labels, those of test samples being another class; only the true ones tell which."""
    labels, indices = federation.y.clone(), torch.cat(federation.test)
    generator = torch.Generator().manual_seed(int(_digest_text(str(labels.tolist()))[:15], 16))
    # Never 0: a false label is another class, and honest predictions seldom hit it.
    shift = torch.randint(1, federation.classes, indices.shape, generator=generator)
    labels[indices] = (labels[indices] + shift) % federation.classes
    return labels


def read_federation(words: Sequence[str]) -> Federation:
    """Read the split of the samples. Raises FedpflError for tasks that the arena does not judge."""
    dealt = deal_data(check_config(overrides.compose_single_run(words)), share_nothing)
    if dealt.newcomers or dealt.shifted or dealt.federation.task is not CLASSIFICATION:
        raise FedpflError("a contract is about classes, without newcomers and shift")
    return dealt.federation


def score_predictions(run: Record, federation: Federation) -> Record:
    """Put the mean accuracy over clients in the place of a run's predictions. Raises Refused."""
    label_sets = torch.stack([federation.y, falsify_labels(federation)])
    scores = []
    for predicted, indices in zip(run.pop("predictions"), federation.test, strict=True):
        if len(indices):
            is_equal = label_sets[:, indices] == torch.tensor(predicted)
            scores.append(100 * is_equal.double().mean(1))
    accuracy, false_accuracy = torch.stack(scores).mean(0).tolist()
    if false_accuracy > BLATANT_SHARE:
        raise Refused(
            f"it has read labels of test samples: {false_accuracy:.0f} % of its predictions are the"
            f" false ones that its process was given, and {accuracy:.0f} % the true ones"
        )
    return {**run, "accuracy": accuracy}


if __name__ == "__main__":
    outlive_readers()
    answer.run_command(main)
