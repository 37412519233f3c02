"""Runs of adapters on a frozen network: what is stored, told and given back."""

from pathlib import Path

from safetensors.torch import save_file

import fedpfl
from fedpfl.config.plan import check_config
from fedpfl.config.run import build_run
from tests.command import TINY_TASK, compose_once, read_checkpoint, read_table
from tests.conftest import assert_close
from tests.record.test_damage import interrupt, refusal

LORA = (
    *("model=mlp", "model.hidden=[32,16]", "adapter=lora", "adapter.layers=[linear]"),
    "adapter.rank=4",
)
FROZEN = 784 * 32 + 32 + 32 * 16 + 16
TRAINED = 4 * (784 + 32) + 4 * (32 + 16) + 16 * 10 + 10


def plan(*words):
    return check_config(compose_once(*TINY_TASK, *words))


def test_only_adapters_are_kept_sent_and_saved_and_models_given_back_are_whole(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    run = fedpfl.run(*TINY_TASK, *LORA, "method=ditto", "participation=1.0", "rounds=1")
    saved = read_checkpoint(run.path)
    names = {*build_run(plan(*LORA)).net.params}
    assert {*saved["server"]} == names
    assert all(name.startswith("classifier") or "lora_" in name for name in names)
    assert all({*rows["client"]["v"]} == names for rows in saved["rows"])
    row = read_table(run.path / "rounds.csv")[0]
    assert int(row["values_down"]) == int(row["values_up"]) == 4 * TRAINED
    log = (run.path / "run.log").read_text()
    assert f"{TRAINED:,} parameters, " in log
    assert f"of them the head (classifier); {FROZEN:,} frozen ones are sent once and" in log
    models = fedpfl.load(run.path)
    for values in (models.personal(0), models.global_model()):
        network = models.network()
        network.load_state_dict(values)  # which refuses names too many or too few
    x, _ = models.samples(0)
    network.load_state_dict(models.personal(0))
    logits = network.eval()(x)
    assert_close({"": logits.detach()}, {"": models.predict(0, x)}, atol=1e-5)


def test_an_interrupted_run_refuses_other_frozen_values(tmp_path, monkeypatch):
    """Those of a file, and those that are drawn, of which only digests are kept."""
    monkeypatch.chdir(tmp_path)
    whole = build_run(plan(*LORA[:2])).net.params
    save_file(whole, tmp_path / "own.safetensors")
    words = (*TINY_TASK, *LORA, "method=fedavg", "rounds=4", "model.weights=own.safetensors")
    interrupt(Path("run"), *words)
    assert {*read_checkpoint(Path("run"))["server"]} == {*build_run(plan(*LORA)).net.params}
    save_file({name: value + 1e-3 for name, value in whole.items()}, tmp_path / "own.safetensors")
    line = refusal(Path("run"), *words)
    assert "was begun with other data (samples, labels, groups, scaling, who holds" in line
    for words, is_equal in ((LORA, False), (LORA[:2], True)):
        runs = [build_run(plan("partition.seed=0", f"seed={seed}", *words)) for seed in (1, 2)]
        assert (runs[0].fingerprint == runs[1].fingerprint) == is_equal
