"""Low-rank pairs of clients with different ranks: who has which, and what servers make of products."""

from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
import torch
from torch import Tensor

from fedpfl import export, models
from fedpfl.config.plan import check_config
from fedpfl.config.run import Run, build_run
from fedpfl.engine import make_initial_state
from fedpfl.ground import tree
from fedpfl.ground.traffic import count_traffic
from fedpfl.ground.tree import Agreed
from fedpfl.methods import METHODS, Method
from fedpfl.models.adapter import lora_with_residue
from tests.command import TINY, compose_once, format_override, play_run
from tests.conftest import CPU, assert_close, assert_same, read_cases
from tests.data.promises import one_line

RANKS = (1, 2, 6, 3)
COHORT = [0, 1, 3]  # whose ranks are 6 together: a product of their stack fits the largest
WEIGHT = torch.tensor([0.2, 0.5, 0.3])
LAYERS = {"blocks.0.attention.qkv": "cor,cri->coi", "conv2": "orkl,rijm->oijm"}


@cache
def begin_server(method: Method) -> tree.Tree:
    """Return a server with the pairs of two networks: of two blocks of rows, and of convolutions."""
    texts = {"vocabulary": 7, "layers": 1, "heads": 2, "width": 8}
    params = {}
    for name, shape, layers, options in (
        ("cnn4", (1, 16, 16), ("conv",), {}),
        ("transformer", (9,), ("q", "v"), texts),
    ):
        adapt = partial(lora_with_residue, rank=6, layers=layers)
        net = models.build_network(name, shape, 5, 0, adapter=adapt, **options)
        params |= net.params
    if not method.has_residue:
        params = {name: leaf for name, leaf in params.items() if "residue" not in name}
    return method.init(params, replace(net.parts, ranks=RANKS))[0]


def list_products(model: tree.Tree) -> dict[str, Tensor]:
    """Return B A and what is beside it of each layer, from factors as einsum has them."""
    products = {}
    for layer, axes in LAYERS.items():
        a, b = (model[f"{layer}.lora_{factor}"].double() for factor in "AB")
        beside = model.get(f"{layer}.lora_residue", torch.zeros(()))
        products[layer] = torch.einsum(axes, b, a) + beside
    return products


def begin(method: Method, server: tree.Tree, number: int) -> tree.Tree:
    client = method.prepare(server, {"number": torch.tensor(number)})
    return method.start(tree.unmask_received(method.download(server, client)), client)


@pytest.mark.parametrize("name", ["flexlora", "flora", "fedex_lora"])
def test_the_mean_of_products_is_exact_whatever_the_ranks(name: str) -> None:
    """In two rounds; in between all begin with the same model where it can be folded."""
    method = METHODS[name]()
    server = begin_server(method)
    rng = torch.Generator().manual_seed(0)
    for _ in range(2):
        starts = [begin(method, server, number) for number in range(4)]
        trained, uploads = [], []
        for number in COHORT:
            noise = {
                name: 0.3 * torch.randn(leaf.shape, generator=rng)
                for name, leaf in starts[0].items()
            }
            client = method.prepare(server, {"number": torch.tensor(number)})
            held = client["held"]
            moved = {name: starts[number][name] + noise[name] * mask for name, mask in held.items()}
            trained.append(list_products({**starts[number], **moved}))
            # What lies beyond a mask does not count.
            uploads.append({"model": Agreed(tree.map(torch.where, held, moved, noise), held)})
        server, _ = method.aggregate(server, {}, None, tree.stack(uploads), WEIGHT, rng)
        model = {**server["model"], **server["residue"]}
        if name == "flora":
            model |= {key: 0 * leaf for key, leaf in model.items() if key.endswith("lora_B")}
        wanted = {
            layer: sum(share * own[layer] for share, own in zip(WEIGHT, trained, strict=True))
            for layer in LAYERS
        }
        assert_close(list_products(model), wanted, atol=1e-6, rtol=1e-6)
        if name == "flexlora":
            continue  # who has rank 1 holds the nearest matrix of it
        for number in range(4):
            assert_close(list_products(begin(method, server, number)), wanted, atol=2e-6)


def test_a_place_without_a_singular_value_goes_on_from_its_former_row():
    method = METHODS["flexlora"]()
    server = begin_server(method)
    moved = {
        key: leaf + 0.1 for key, leaf in begin(method, server, 0).items() if "residue" not in key
    }
    held = method.prepare(server, {"number": torch.tensor(0)})["held"]
    uploads = {"model": Agreed(tree.apply_mask(moved, held), held)}
    new, _ = method.aggregate(server, {}, None, tree.repeat(uploads, 1), torch.ones(1), None)
    a, b = ("blocks.0.attention.qkv.lora_A", "blocks.0.attention.qkv.lora_B")
    assert new["model"][b][..., :1].any()
    assert not new["model"][b][..., 1:].any()
    assert_same(new["model"][a][:, 1:], server["model"][a][:, 1:])


def test_hetlora_goes_by_samples_where_no_product_has_a_norm():
    method = METHODS["hetlora"]()
    server = begin_server(method)
    held = method.prepare(server, {"number": torch.tensor(2)})["held"]
    uploads = {"model": Agreed(server["model"], held)}
    new, _ = method.aggregate(server, {}, None, tree.repeat(uploads, 3), WEIGHT, None)
    assert_close(new["model"], server["model"])


def run_of(*words: str) -> Run:
    adapter = ("adapter=lora", "adapter.layers=[linear]", "method=hetlora", *words)
    return build_run(check_config(compose_once(*TINY, "dataset=digits", *adapter)))


def test_ranks_are_dealt_in_turn_at_random_by_device_and_by_name(tmp_path):
    ranks = "adapter.rank=[8,2,4]"
    assert run_of(ranks, "clients=7").net.parts.ranks == (8, 2, 4, 8, 2, 4, 8)
    # ---- Equal ones are one rank.
    one, equal = (run_of(f"adapter.rank={rank}").net for rank in ("4", "[4,4]"))
    assert one.parts.ranks == equal.parts.ranks == ()
    assert_same(one.params, equal.params)
    added = run_of("adapter.rank=4", "method=fedex_lora").net.params.keys() - one.params.keys()
    assert added == {"hidden.0.lora_residue"}
    # ---- Newcomers keep theirs and stand last.
    dealt = run_of(ranks, "clients=7", "unseen=0.3")
    numbers = dealt.federation.partition_numbers + dealt.newcomers.partition_numbers
    assert dealt.net.parts.ranks == tuple((8, 2, 4)[number % 3] for number in numbers)
    drawn = {
        run_of(ranks, "clients=6", "adapter.assign=random", f"seed={s}").net.parts.ranks
        for s in (1, 2)
    }
    assert len(drawn) == 2
    assert {tuple(sorted(own)) for own in drawn} == {(2, 2, 4, 4, 8, 8)}
    run = run_of(ranks, "clients=6", "adapter.assign=device", "system=simulated")
    by_speed = sorted(range(6), key=lambda client: run.clock.devices[client].speed)
    assert [run.net.parts.ranks[client] for client in by_speed] == [2, 2, 4, 4, 8, 8]
    # ---- Sites
    rng = np.random.default_rng(0)
    np.savez(
        tmp_path / "own.npz",
        x=rng.normal(size=(40, 9)),
        y=np.arange(40) % 2,
        groups=np.repeat(["b", "a"], 20),
    )
    words = (ranks, "dataset=npz", format_override("dataset.path", tmp_path / "own.npz"))
    words += ("partition=groups", "clients=2", "partition.samples_per_client=null")
    run = run_of(*words, "adapter.assign={a: 8, b: 2}")
    assert dict(zip(run.federation.client_names, run.net.parts.ranks, strict=True)) == {
        "a": 8,
        "b": 2,
    }
    told = one_line(lambda: run_of(*words, "adapter.assign={a: 8}"))
    assert told == "adapter.assign must name one of 8, 2, 4 for each client, and has None for b"


REFUSED = """
method=fedsa_lora => method=fedsa_lora has one rank for all clients; give adapter.rank one number, or choose fedex_lora,
adapter.assign=device => adapter.assign=device goes by clients' devices; use system=simulated
adapter.rank=4;adapter.assign={a: 2} => adapter.assign: a client must be one of
adapter.assign={c: 2} => adapter.assign: a client must be one of
adapter.assign={0: 3,1: 2} => adapter.assign must name one of 2, 4 for each client, and has 3 for 0
adapter.rank=[] => model=mlp: adapter.rank must be a number or several, got []
"""


@pytest.mark.parametrize(("words", "told"), read_cases(REFUSED))
def test_ranks_that_fit_nothing_are_one_line(words: str, told: str) -> None:
    assert one_line(lambda: run_of("adapter.rank=[2,4]", *words.split(";"))).startswith(told)


def test_what_travels_is_the_clients_own_rank():
    run = run_of("adapter.rank=[2,4]")
    server = make_initial_state(run.method, run.net, 4, CPU).server
    clients = [run.method.prepare(server, {"number": torch.tensor(i)}) for i in (0, 1)]
    counts = [int(count_traffic(run.method.download(server, own)).values) for own in clients]
    # Noise, too, must not move what else there is.
    masks = [run.method.phases(server, own, server["model"], 1)[0].mask for own in clients]
    assert_same(masks, [own["held"] for own in clients])
    layer = 28 * 28 + 8  # inputs and outputs
    assert counts == [2 * layer + 90, 4 * layer + 90]


@pytest.mark.full
def test_peft_is_given_no_model_with_a_residue(tmp_path, capsys):
    words = ("dataset=digits", "adapter=lora", "adapter.layers=[linear]", "adapter.rank=2")
    play_run(tmp_path / "run", *TINY, *words, "method=fedex_lora")
    assert export.main(["--format", "peft", str(tmp_path / "run"), str(tmp_path / "models")])
    assert "no residue beside it; use --format safetensors" in capsys.readouterr().err
