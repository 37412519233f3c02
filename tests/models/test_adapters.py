"""Adapters on frozen networks, and attention: the numbers of whole weights, shared by all clients."""

import copy
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call, grad, vmap

from fedpfl import models
from fedpfl.ground import tree, vision
from fedpfl.ground.errors import FedpflError
from fedpfl.models import ADAPTERS
from tests.conftest import HEAD, assert_close, assert_same

VIT = {"patch": 4, "layers": 2, "heads": 2, "width": 16}
TEXTS = {"vocabulary": 7, "layers": 1, "heads": 2, "width": 8}
ALL = ("k", "proj", "mlp", "conv")
GREY = torch.randn(2, 1, 16, 16)
NETWORKS = {  # options, layers with pairs, samples
    "vit": (VIT, ("q", "v"), torch.randn(3, 3, 16, 16)),
    "vit-all": ({**VIT, "patch": 8, "layers": 1}, ALL, GREY),
    "transformer": (TEXTS, ("q", "mlp"), torch.randint(7, (4, 9))),
    "cnn4": ({}, ("conv", "linear"), GREY),
}
cases = pytest.mark.parametrize("name", NETWORKS)


def built(name, adapter="none", **options):
    own, layers, x = NETWORKS[name]
    more = {"layers": layers, **options} if adapter == "lora" else options
    adapt = partial(ADAPTERS[adapter], **more)
    kind, shape = name.partition("-")[0], tuple(x.shape[1:])
    return models.build_network(kind, shape, 5, 0, adapter=adapt, **own), x


def logits(net, params, x):
    return net.bind({"main": net.buffers})(params, x)


def trained(net, seed=0):
    """Other values for what trains."""
    g = torch.Generator().manual_seed(seed)
    return tree.map(lambda leaf: leaf + 0.1 * torch.randn(leaf.shape, generator=g), net.params)


def merged(net, params, whole):
    """The whole network with the additions in its weights, by products of matrices."""
    values = {name: params.get(name, net.frozen.get(name)) for name in whole.params}
    for name in [name for name in params if name.endswith("lora_A")]:
        layer = net.module.get_submodule(name.removesuffix(".lora_A"))
        a = params[name]
        b = params[name.replace("lora_A", "lora_B")]
        weight = name.replace("lora_A", "weight")
        added = torch.zeros_like(values[weight])
        if added.dim() == 4:
            added += torch.einsum("or,rikl->oikl", b[:, :, 0, 0], a)
        else:
            for place, block in enumerate(layer.adapted_blocks):
                rows = len(added) // layer.blocks
                added[block * rows : (block + 1) * rows] += b[place] @ a[place]
        values[weight] = values[weight] + layer.scale * added
    return values


@cases
def test_at_the_start_the_network_is_the_pretrained_one_bit_for_bit(name):
    whole, x = built(name)
    for adapter, more in (("head", {}), ("bitfit", {}), ("lora", {}), ("lora", {"pairs": 2})):
        net, _ = built(name, adapter, **more)
        assert torch.equal(logits(net, net.params, x), logits(whole, whole.params, x)), adapter


@cases
def test_low_rank_additions_are_those_of_merged_weights_and_so_are_gradients(name):
    (whole, x), (net, _) = built(name), built(name, "lora", rank=2, alpha=3.0)
    params = trained(net)
    assert_close(logits(net, params, x), logits(whole, merged(net, params, whole), x), atol=1e-5)
    own = grad(lambda p: logits(net, p, x).square().sum())(params)
    through = grad(lambda p: logits(whole, merged(net, p, whole), x).square().sum())(params)
    assert_close(own, through, atol=2e-4, rtol=2e-4)
    assert all(leaf.any() for leaf in own.values())


def test_each_block_of_rows_has_a_mixer_of_its_own():
    net, _ = built("vit", "lora", pairs=2, rank=3)
    layer = net.module.get_submodule("encoder.layers.encoder_layer_1.self_attention.qkv")
    x = torch.randn(2, 5, 16)
    named = trained(net).items()
    own = {key.rpartition(".")[2]: value for key, value in named if "layer_1.self_att" in key}
    out, whole = functional_call(layer, own, (x,)), F.linear(x, layer.weight, layer.bias)
    for place, block in enumerate(layer.adapted_blocks):
        for sample, token in ((0, 0), (1, 4)):
            column = x[sample, token]
            votes = (own["lora_mixer"][place] @ column).exp()
            added = torch.zeros(16)
            for vote, pair in zip(votes / votes.sum(), ("", "1"), strict=True):
                low = own[f"lora_B{pair}"][place] @ own[f"lora_A{pair}"][place] @ column
                added = added + layer.scale * vote * low
            rows = slice(16 * block, 16 * block + 16)
            assert_close(out[sample, token, rows], whole[sample, token, rows] + added, atol=1e-5)


@cases
def test_what_is_frozen_stands_in_one_place_and_in_no_tree(name):
    net, _ = built(name, "lora")
    other = net.copy()
    assert {*net.frozen} == {*other.frozen}
    assert not {*net.frozen} & {*net.params}
    assert all(net.frozen[name].data_ptr() == other.frozen[name].data_ptr() for name in net.frozen)
    kinds = {name.rpartition(".")[2] for name in net.params}
    assert kinds <= {"lora_A", "lora_B", "weight", "bias"}
    assert {name for layer in net.parts.layers for name in layer} == {*net.params}
    assert set(net.parts.head) <= {*net.params}
    before = copy.deepcopy(net.frozen)
    grad(lambda p: logits(net, p, NETWORKS[name][2]).sum())(trained(net))
    assert_same(net.frozen, before)


def test_only_what_an_adapter_says_trains():
    biases = {"conv1.bias", "conv2.bias", "fc1.bias"}
    for adapter, wanted in (("head", {*HEAD}), ("bitfit", {*HEAD} | biases)):
        assert {*built("cnn4", adapter)[0].params} == wanted
    vit, _ = built("vit", "lora", rank=3)
    name = "encoder.layers.encoder_layer_0.self_attention.qkv.lora_"
    assert [[*vit.params[f"{name}{part}"].shape] for part in "AB"] == [[2, 3, 16], [2, 16, 3]]


def test_what_a_network_has_no_room_for_is_refused():
    with pytest.raises(
        FedpflError, match=r"^model=cnn4: adapter\.layers: the network has no q; it "
    ):
        built("cnn4", "lora", layers=("q",))
    with pytest.raises(
        FedpflError, match=r"^model=cnn4: adapter\.rank=99 is more than fc1 has room"
    ):
        built("cnn4", "lora", layers=("linear",), rank=99)


def theirs(net):
    """Torchvision's network with the values of ours."""
    kind = vision.load_torchvision("models").VisionTransformer
    net_ = kind(16, *VIT.values(), 4 * VIT["width"], num_classes=5)
    names = {"qkv.weight": "in_proj_weight", "qkv.bias": "in_proj_bias", "proj.": "out_proj."}
    values = {}
    for name, value in net.params.items():
        for one, other in names.items() if "self_attention" in name else ():
            name = name.replace(one, other)
        values[name] = value
    net_.load_state_dict(values)
    return net_.eval()


def test_attention_is_torchvisions_and_vectorises_without_a_warning():
    net, x = built("vit")
    assert_close(logits(net, net.params, x), theirs(net)(x), atol=2e-6)
    stacked = tree.stack([trained(net, seed) for seed in range(3)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        slopes = vmap(grad(lambda p: functional_call(net.module, p, (x,)).square().sum()))(stacked)
    for row in range(3):
        alone = grad(lambda p: logits(net, p, x).square().sum())(tree.take(stacked, row))
        assert_close(tree.take(slopes, row), alone, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("dialect", ["torchvision", "timm", "transformers"])
def test_a_vision_transformer_starts_from_the_files_of_others(dialect):
    net, _ = built("vit")
    if dialect == "torchvision":
        values = theirs(net).state_dict()
    else:
        values = {_in(dialect, name): value for name, value in net.params.items()}
        for name in [name for name in values if dialect == "transformers" and ".qkv." in name]:
            parts = zip(("query", "key", "value"), values.pop(name).chunk(3), strict=True)
            values |= {name.replace("qkv", part): own for part, own in parts}
    again = models.build_network("vit", (3, 16, 16), 5, 1, weights=values, **VIT)
    assert_same(again.params, net.params)
    larger = models.build_network("vit", (3, 24, 24), 7, 1, weights=values, **VIT)
    assert larger.params["encoder.pos_embedding"].shape == (1, 37, 16)
    other = {n: net.params[n] for n in ("encoder.pos_embedding", *net.parts.head)}
    assert_same({**larger.params, **other}, net.params)


def _in(dialect, name):
    """The name elsewhere, by reading the patterns backwards."""
    places = {
        "timm": {
            "class_token": "cls_token", "encoder.pos_embedding": "pos_embed", "conv_proj.": "patch_embed.proj.",
            "encoder.ln.": "norm.", "heads.head.": "head.", "encoder.layers.encoder_layer_": "blocks.",
            ".ln_": ".norm", ".self_attention.": ".attn.", ".mlp.0.": ".mlp.fc1.", ".mlp.3.": ".mlp.fc2.",
        },
        "transformers": {
            "class_token": "vit.embeddings.cls_token", "encoder.pos_embedding": "vit.embeddings.position_embeddings",
            "conv_proj.": "vit.embeddings.patch_embeddings.projection.", "encoder.ln.": "vit.layernorm.",
            "heads.head.": "classifier.", "encoder.layers.encoder_layer_": "vit.encoder.layer.",
            ".ln_1.": ".layernorm_before.", ".ln_2.": ".layernorm_after.",
            ".self_attention.proj.": ".attention.output.dense.", ".self_attention.": ".attention.attention.",
            ".mlp.0.": ".intermediate.dense.", ".mlp.3.": ".output.dense.",
        },
    }  # fmt: skip
    for ours, others in places[dialect].items():
        name = name.replace(ours, others)
    return name
