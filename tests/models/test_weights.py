"""Networks that start from a file."""

import hashlib
import pickle

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from fedpfl import models
from fedpfl.config.plan import check_config
from fedpfl.config.run import build_run
from fedpfl.data.state_dict import read_state_dict
from fedpfl.ground import tree, vision
from fedpfl.ground.errors import FedpflError
from tests.command import TINY_TASK, compose_once, format_override
from tests.conftest import HEAD, assert_close, assert_same


def start(name="resnet8", classes=10, weights=None):
    values = read_state_dict(weights) if weights else None
    return models.build_network(name, (1, 16, 16), classes, 0, weights=values)


def saved(tmp_path, net, name="own.pt", **changes):
    values = {**net.params, **net.buffers, **changes}
    torch.save({key: value for key, value in values.items() if value is not None}, tmp_path / name)
    return tmp_path / name


@pytest.mark.parametrize("name", ["resnet8", "lenet5"])
def test_own_weights_and_statistics_come_back(name, tmp_path):
    other = models.build_network(name, (1, 16, 16), 10, 7)
    for value in other.buffers.values():
        value.add_(1)
    found = start(name, weights=saved(tmp_path, other))
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
    weights = read_state_dict(tmp_path / "theirs.pth")
    net = models.build_network("resnet18", (3, 32, 32), 1000, 0, weights=weights)
    x = torch.randn(2, 3, 40, 40)
    assert_close(net.bind({"main": net.buffers})(net.params, x), theirs(x))


def test_a_hash_in_the_name_is_checked(tmp_path):
    path = saved(tmp_path, start())
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:8]
    right, wrong = tmp_path / f"own-{digest}.pth", tmp_path / "own-00000000.pth"
    for copy in (right, wrong):
        copy.write_bytes(path.read_bytes())
    start(weights=right)
    with pytest.raises(FedpflError, match=f"SHA-256 of .*own-00000000.pth begins with {digest}"):
        start(weights=wrong)


def test_a_file_of_more_than_weights_is_refused(tmp_path):
    with pytest.raises(FedpflError, match="must hold a network's state_dict and nothing else"):
        start(weights=saved(tmp_path, start(), **{"norm.bias": 3.0}))


SMALL = {"patch": 4, "layers": 1, "heads": 2, "width": 8}


def vit(seed=0, **other):
    return models.build_network("vit", (1, 8, 8), 5, seed, **{**SMALL, **other})


BAD_FILES = {
    "empty.safetensors": (lambda good: b"", "cannot be read"),
    "cut.safetensors": (lambda good: good[: len(good) // 2], "cannot be read"),
    "pickle.safetensors": (lambda good: pickle.dumps({"weight": 1}), "cannot be read"),
    "empty.pt": (lambda good: b"", "cannot be read"),
    "broken.pt": (lambda good: b"PK\x03\x04 broken", "cannot be read"),
    "other.pt": (lambda good: good, "it is no file of torch.save's, or holds more than tensors.$"),
    "trap.pt": (lambda good: pickle.dumps(Trap(), protocol=2), "no file of torch.save's"),
    "resnet.safetensors": (lambda good: save(start().params), "model.weights has no class_token"),
    "deeper.safetensors": (lambda good: save(vit(layers=2).params), "which the network lacks$"),
    "wider.safetensors": (
        lambda good: save(vit(width=16).params),
        r"\[1, 1, 16\], .* \[1, 1, 8\]$",
    ),
    "whole.safetensors": (lambda good: save(tree.map(Tensor.long, vit().params)), "no finite flo"),
    "nan.safetensors": (lambda good: save(tree.map(lambda v: v / 0, vit().params)), "no finite"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_files_that_are_not_this_networks_safetensors(name, tmp_path, capsys):
    content, told = BAD_FILES[name]
    (tmp_path / name).write_bytes(content(save(vit(7).params)))
    with pytest.raises(FedpflError, match=told) as error:
        vit(weights=read_state_dict(tmp_path / name))
    assert "\n" not in str(error.value)
    assert "unpickled" not in capsys.readouterr().out


def test_safetensors_come_back(tmp_path):
    (tmp_path / "good.safetensors").write_bytes(save(vit(7).params))
    found = vit(weights=read_state_dict(tmp_path / "good.safetensors"))
    assert_same(found.params, vit(7).params)


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
