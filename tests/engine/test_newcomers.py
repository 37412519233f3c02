"""Samples that are held out and clients that never take part: what they are judged by, and that
they change nothing.
"""

import dataclasses
import math
from copy import deepcopy

import numpy as np
import pytest
import torch

import fedpfl
from fedpfl import data
from fedpfl.config.plan import check_config
from fedpfl.config.run import build_run
from fedpfl.engine import (
    Engine,
    FineTuning,
    RoundSetup,
    make_backend,
    make_initial_state,
    play_round,
)
from fedpfl.engine.calls import EvalCall
from fedpfl.engine.keys import Draws
from fedpfl.methods import METHODS
from tests.command import TINY, compose_once, play_run, read_table
from tests.conftest import (
    CLASSES,
    CPU,
    LOCAL,
    assert_same,
    differing,
    every_method,
    hold_out_quarter,
    keep_only,
    make_federation,
)

COHORTS = [0, 2, 4, 6], [1, 2, 3, 5]  # of the seven that take part
SETTINGS = (*TINY, *("clients=6", "validation=0.25", "unseen=0.34", "eval.finetune_epochs=1"))
VALIDATE = ("fedfomo", "fedobp_adaptive")
JUDGED = ("eval.finetune_every=2", "local.batch_size=8")


@pytest.fixture(scope="module")
def worlds():
    """Those who take part and those who do not, as they are, and with other samples where nobody
    may look.

    There are two of these: with other validation samples, and with other test samples for those who
    validate.
    """
    whole = hold_out_quarter(make_federation())
    away = data.draw_newcomers(10, 3, seed=0)
    clean = whole.split_newcomers(away)
    assert [own.clients for own in clean] == [7, 3]

    def otherwise(hidden):
        secret = torch.cat([*hidden, *clean[1].train, *clean[1].test, *clean[1].validation])
        x, y = whole.x.clone(), whole.y.clone()
        x[secret], y[secret] = 255 - x[secret], (y[secret] + 1) % CLASSES
        return dataclasses.replace(whole, x=x, y=y).split_newcomers(away)

    return clean, otherwise(clean[0].validation), otherwise(clean[0].test)


def rounds(method, net, world, watched):
    """States after each round, and what was judged; `watched`: also newcomers, before every round."""
    (federation, unseen), net = world, net.with_facts(clients=len(world[0].train))
    runner = make_backend(Engine("loop"), net, CPU)
    now, states, judged = make_initial_state(method, net, federation.clients, CPU), [], []
    fresh = make_initial_state(method, net, unseen.clients, CPU)
    everyone = list(range(federation.clients))
    for cohort in COHORTS:
        for tuning in (None, FineTuning(LOCAL, Draws(0, "finetune", now.round))):
            call = EvalCall(method, federation, now, everyone, tuning)
            judged.append(runner.evaluate_splits(call))
            if watched:
                late = dataclasses.replace(now, rows=fresh.rows, members=now.rows)
                others = list(range(unseen.clients))
                counts = runner.evaluate(EvalCall(method, unseen, late, others, tuning))
                assert counts.total.tolist() == unseen.test_sizes.tolist()
        now, _ = play_round(RoundSetup(runner, method, federation, LOCAL, 0), now, cohort)
        states.append(deepcopy(now))
    return states, judged


@every_method(quick=("fedavg", "fedobp_adaptive"))
def test_nobody_learns_from_what_is_held_out_nor_from_who_never_takes_part(
    name, values, net, worlds
):
    """With other samples there nothing else is other: no state, no accuracy on test samples, also
    fine-tuned.

    A method that `validates` chooses by the validation samples, with others of which all is other,
    and then test samples are no more than judged by.
    """
    method = METHODS[name](**values)
    # kNN-Per without a weight of its own chooses one.
    assert method.validates == (name in VALIDATE or values.get("lam", 0) is None)
    same, other = ("validation", "test") if method.validates else ("test", "validation")
    clean, secret = worlds[0], worlds[2 if method.validates else 1]
    (states, judged), (anew, again) = (
        rounds(method, net, world, watched=world is secret) for world in (clean, secret)
    )
    assert_same(states, anew)
    sizes = [len(own) for own in clean[0].validation]
    for counts, others in zip(judged, again, strict=True):
        assert_same(counts[same], others[same])
        assert counts["validation"].total.tolist() == sizes
        assert differing(counts[other], others[other])
    if method.validates:
        assert differing(states, rounds(method, net, worlds[1], watched=False)[0])


def test_who_never_takes_part_is_drawn_by_the_partitions_seed():
    """As in every run so far."""
    whole = make_federation()
    away = data.draw_newcomers(10, 3, seed=5)
    assert (away, data.draw_newcomers(100, 5, seed=0)) == ([0, 2, 4], [27, 62, 65, 75, 88])
    seen, unseen = whole.split_newcomers(away)
    assert list(unseen.partition_numbers) == away
    assert list(seen.partition_numbers) == [client for client in range(10) if client not in away]
    assert seen.select_clients([0, 2]).partition_numbers == (1, 5)
    for federation in (seen, unseen):
        for client, number in enumerate(federation.partition_numbers):
            assert federation.partition_number(client) == number
            assert_same(federation.train[client], whole.train[number])
            assert_same(federation.test[client], whole.test[number])
    assert whole.split_newcomers([]) == (whole, None)


def percent(trained, client, split):
    """Of a client's personal model on its own samples, through the public interface."""
    x, y = trained.samples(client, split)
    return 100 * float((trained.predict(client, x).argmax(1) == y).double().mean())


@pytest.mark.parametrize(
    "method", keep_only(["fedobp", "heterofl", "local_only"], ["fedobp", "local_only"])
)
def test_the_columns_are_the_accuracies_of_the_models(method, tmp_path):
    play_run(tmp_path, *SETTINGS, *JUDGED, f"method={method}")
    trained, last = fedpfl.load(tmp_path), read_table(tmp_path / "rounds.csv")[-1]
    clients = trained.clients
    unseen = clients["unseen"] == 1
    with np.load(tmp_path / "partition.npz") as file:
        assert clients["client"][unseen].tolist() == sorted(file["unseen"].tolist())
    assert unseen.sum() == 2
    own = torch.tensor([percent(trained, client, "test") for client in range(6)])
    members = [client for client in range(6) if not unseen[client]]
    held = torch.tensor([percent(trained, client, "validation") for client in members])
    is_late = torch.tensor(unseen.values)
    seen, late = own[~is_late], own[is_late]
    assert float(last["accuracy"]) == pytest.approx(float(seen.mean()))
    assert float(last["val_accuracy"]) == pytest.approx(float(held.mean()))
    assert clients["val_accuracy"][~unseen].tolist() == pytest.approx(held.tolist())
    assert clients["val_accuracy"][unseen].isna().all()
    sizes = torch.tensor(clients["test"][unseen].to_numpy())
    if method == "local_only":  # a newcomer has the model that all began with
        assert last["unseen_accuracy"] == last["unseen_loss"] == ""
        assert clients["accuracy"][unseen].isna().all()
    else:
        assert float(last["unseen_accuracy"]) == pytest.approx(float(late.mean()))
        assert float(last["unseen_accuracy_worst10"]) == pytest.approx(float(late.min()))
        pooled = float((late * sizes).sum() / sizes.sum())
        assert float(last["unseen_accuracy_pooled"]) == pytest.approx(pooled)
    tuned = torch.tensor(clients["ft_accuracy"].to_numpy())
    assert float(last["unseen_ft_accuracy"]) == pytest.approx(float(tuned[is_late].mean()))
    assert float(last["ft_accuracy"]) == pytest.approx(float(tuned[~is_late].mean()))
    assert math.isfinite(float(last["val_ft_accuracy"]))


def test_samples_are_scaled_by_what_those_who_take_part_train_on():
    plan = build_run(check_config(compose_once(*SETTINGS, "dataset.mean=null", "dataset.std=null")))
    assert plan.newcomers.clients == 2
    assert plan.federation.validation
    pixels = plan.federation.x[torch.cat(plan.federation.train)] / 255
    for part in (plan.federation, plan.newcomers):
        torch.testing.assert_close(
            [*part.mean, *part.std], [float(pixels.mean()), float(pixels.std(correction=0))]
        )
