"""Adapters on frozen networks, and attention: the numbers of whole weights, shared by all clients.
Networks that start from a file.
"""

import hashlib
import pickle
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils import parametrizations

from fedpfl import models
from fedpfl.config.plan import check_config
from fedpfl.config.run import build_run
from fedpfl.data.state_dict import read_weights
from fedpfl.ground import tree, vision
from fedpfl.ground.errors import FedpflError
from fedpfl.models import ADAPTERS
from tests.command import TINY_TASK, compose_once, format_override
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


def test_only_what_an_adapter_says_trains():
    biases = {"conv1.bias", "conv2.bias", "fc1.bias"}
    for adapter, wanted in (("head", {*HEAD}), ("bitfit", {*HEAD} | biases)):
        assert {*built("cnn4", adapter)[0].params} == wanted
    vit, _ = built("vit", "lora", rank=3)
    name = "encoder.layers.encoder_layer_0.self_attention.qkv.lora_"
    assert [[*vit.params[f"{name}{part}"].shape] for part in "AB"] == [[2, 3, 16], [2, 16, 3]]


class Encoder(nn.Module):
    """Torch's own transformer, in which layers are called, or read past their calls."""

    def __init__(self, shape, classes):
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(shape[-1], 2, 8, 0.0, batch_first=True)
        self.centred = Centred(shape[-1], 6)
        self.normed = parametrizations.weight_norm(nn.Linear(6, 6))
        self.out = nn.Linear(6, classes)

    def forward(self, x):
        return self.out(self.normed(self.centred(self.encoder(x.flatten(1, 2)))).mean(1))


class Centred(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight - self.weight.mean(), self.bias)


class PastLayer(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.hidden = nn.Linear(shape[-1], 6)
        self.out = nn.Linear(6, classes)

    def forward(self, x):
        return self.out(F.linear(x.flatten(1, 2), self.hidden.weight).mean(1))


def test_in_a_network_of_others_additions_act_where_its_layers_are_products(monkeypatch):
    monkeypatch.setitem(models.MODELS, "encoder", Encoder)
    adapt = partial(ADAPTERS["lora"], layers=("linear",), rank=2)
    plain = models.build_network("encoder", GREY.shape[1:], 5, 0)
    net = models.build_network("encoder", GREY.shape[1:], 5, 0, adapter=adapt)
    # ---- Neither a user's own layer, nor what is computed of a weight, nor attention's projection.
    adapted = {name.rpartition(".")[0] for name in net.params if "lora" in name}
    assert adapted == {"encoder.linear1", "encoder.linear2"}
    # ---- In evaluation as in training; torch reads such weights past their layers.
    with torch.no_grad():
        assert_same(logits(net, net.params, GREY), logits(plain, plain.params, GREY))
        moved = trained(net)
        training = net.bind({}, training=True)(moved, GREY)
        assert_close(logits(net, moved, GREY), training)
        head = {**net.params, **tree.select(moved, ["out.weight", "out.bias"])}
        assert not torch.allclose(training, logits(net, head, GREY))


@pytest.mark.parametrize(
    ("name", "layer", "rank", "told"),
    [
        ("cnn4", "q", 2, r"adapter\.layers: the network has no q; it "),
        ("cnn4", "linear", 99, r"adapter\.rank=99 is more than fc1 has room"),
        ("past", "linear", 2, r".* does not call hidden\(x\)"),
    ],
)
def test_additions_without_room_or_effect_are_refused(name, layer, rank, told, monkeypatch):
    monkeypatch.setitem(models.MODELS, "past", PastLayer)
    adapt = partial(ADAPTERS["lora"], layers=(layer,), rank=rank)
    with pytest.raises(FedpflError, match=f"^model={name}: {told}"):
        models.build_network(name, GREY.shape[1:], 5, 0, adapter=adapt)


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


def test_a_vision_transformer_starts_from_torchvisions_files():
    net, _ = built("vit")
    values = theirs(net).state_dict()
    again = models.build_network("vit", (3, 16, 16), 5, 1, weights=values, **VIT)
    assert_same(again.params, net.params)
    larger = models.build_network("vit", (3, 24, 24), 7, 1, weights=values, **VIT)
    assert larger.params["encoder.pos_embedding"].shape == (1, 37, 16)
    other = {n: net.params[n] for n in ("encoder.pos_embedding", *net.parts.head)}
    assert_same({**larger.params, **other}, net.params)


# Networks that start from a file


def start(name="resnet8", classes=10, weights=None):
    values = read_weights(weights).values if weights else None
    return models.build_network(name, (1, 16, 16), classes, 0, weights=values)


def saved(tmp_path, net, name="own.pt", **changes):
    values = {**net.params, **net.buffers, **changes}
    values = {key: value for key, value in values.items() if value is not None}
    if name.endswith(".safetensors"):
        (tmp_path / name).write_bytes(save(values))
    else:
        torch.save(values, tmp_path / name)
    return tmp_path / name


@pytest.mark.parametrize(
    ("name", "file"), [("resnet8", "own.pt"), ("resnet8", "own.safetensors"), ("lenet5", "own.pt")]
)
def test_own_weights_and_statistics_come_back(name, file, tmp_path):
    other = models.build_network(name, (1, 16, 16), 10, 7)
    for value in other.buffers.values():
        value.add_(1)
    found = start(name, weights=saved(tmp_path, other, file))
    assert_same([found.params, found.buffers], [other.params, other.buffers])


def test_the_classifier_is_drawn_where_the_classes_differ(tmp_path):
    other, fresh = models.build_network("resnet8", (1, 16, 16), 1000, 7), start()
    for absent in ((), ("classifier.weight",), HEAD):
        changes = dict.fromkeys(absent)
        found = start(weights=saved(tmp_path, other, **changes))
        head = {name: found.params[name] for name in found.parts.head}
        assert_same(head, {name: fresh.params[name] for name in head})
        assert_same(found.params, {**other.params, **head})


def test_torchvisions_names(tmp_path):
    vision.load_torchvision()  # where its import is mended
    from torchvision.models.resnet import BasicBlock, ResNet

    theirs = ResNet(BasicBlock, [2] * 4, num_classes=1000).eval()
    for part in theirs.modules():  # so that no two layers are alike
        if isinstance(part, torch.nn.BatchNorm2d):
            for values in (part.weight, part.bias, part.running_mean, part.running_var):
                torch.nn.init.uniform_(values, 0.5, 1.5)
    torch.save(theirs.state_dict(), tmp_path / "theirs.pth")
    weights = read_weights(tmp_path / "theirs.pth").values
    net = models.build_network("resnet18", (3, 32, 32), 1000, 0, weights=weights)
    x = torch.randn(2, 3, 40, 40)
    assert_close(net.bind({"main": net.buffers})(net.params, x), theirs(x))


def test_a_hash_in_the_name_is_checked(tmp_path):
    path = saved(tmp_path, start())
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:8]
    right, wrong = tmp_path / f"own-{digest}.pth", tmp_path / "own-00000000.pth"
    for place in (right, wrong):
        place.write_bytes(path.read_bytes())
    start(weights=right)
    with pytest.raises(FedpflError, match=f"SHA-256 of .*own-00000000.pth begins with {digest}"):
        start(weights=wrong)


BAD_FILES = {
    "empty.safetensors": (lambda: b"", "cannot be read"),
    "trap.pt": (lambda: pickle.dumps(Trap(), protocol=2), "no file of torch.save's"),
    "resnet.safetensors": (lambda: save(start().params), "model.weights: .* Missing .*class_token"),
    "wider.safetensors": (lambda: save(vit(width=16).params), r"mismatch .*\[1, 1, 16\]"),
}


def vit(**other):
    small = {"patch": 4, "layers": 1, "heads": 2, "width": 8}
    return models.build_network("vit", (1, 8, 8), 5, 0, **{**small, **other})


@pytest.mark.parametrize("name", BAD_FILES)
def test_files_that_are_not_this_networks_safetensors(name, tmp_path, capsys):
    content, told = BAD_FILES[name]
    (tmp_path / name).write_bytes(content())
    with pytest.raises(FedpflError, match=told) as error:
        vit(weights=read_weights(tmp_path / name).values)
    assert "\n" not in str(error.value)
    assert "unpickled" not in capsys.readouterr().out


class Trap:
    """Runs code where it is unpickled."""

    def __reduce__(self):
        return print, ("unpickled",)


def test_they_stand_in_the_folder_of_the_data(tmp_path):
    net = models.build_network("lenet5", (1, 28, 28), 10, 7)
    saved(tmp_path, net)
    tiny = (*TINY_TASK, "model=lenet5", format_override("data_dir", tmp_path))
    run = build_run(check_config(compose_once(*tiny, "model.weights=own.pt")))
    assert_same(run.net.params, net.params)
    told = "there is no file .*other.pt; put it there, or give its full path"
    with pytest.raises(FedpflError, match=f"^model.weights: {told}$"):
        build_run(check_config(compose_once(*tiny, "model.weights=other.pt")))
