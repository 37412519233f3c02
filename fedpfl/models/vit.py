"""Vision transformers: torchvision's, and those of timm."""

from __future__ import annotations

from torch import nn

from fedpfl.ground.errors import missing_extra
from fedpfl.ground.ranges import Count
from fedpfl.ground.records import Record
from fedpfl.ground.vision import load_torchvision
from fedpfl.models.attention import ForTorchvision
from fedpfl.models.shapes import image


def vit(
    shape: tuple[int, ...],
    classes: int,
    patch: Count = 4,
    layers: Count = 6,
    heads: Count = 4,
    width: Count = 128,
) -> nn.Module:
    """Build torchvision's VisionTransformer (Dosovitskiy et al., ICLR 2021) for square images,
    without dropout.

    patch: pixels each way. Hidden layers are four times as wide as the stream, 1,205,898 scalars as
    a default for [3, 32, 32] and 10 classes. Images of one channel have a first layer for one.
    """
    channels, height, side = image(shape, patch)
    if height != side or side % patch:
        raise ValueError(
            f"images must be square, {patch} (model.patch) a divisor of their sides, got "
            f"{height}x{side}"
        )
    if width % heads:
        raise ValueError(f"model.width={width} must be a multiple of model.heads={heads}")
    network = load_torchvision("models").VisionTransformer(
        side, patch, layers, heads, width, 4 * width, num_classes=classes
    )
    # torchvision builds for three channels alone.
    if channels != network.conv_proj.in_channels:
        network.conv_proj = nn.Conv2d(channels, width, patch, patch)
    for block in network.encoder.layers:
        # Theirs calls fused kernels, which vmap would call client by client.
        block.self_attention = ForTorchvision(width, heads)
    nn.init.xavier_uniform_(
        network.heads.head.weight
    )  # torchvision's zeros would leave the body without a gradient
    return network


def vit_tiny(shape: tuple[int, ...], classes: int, patch: Count = 16) -> nn.Module:
    """Build the tiny one (Touvron et al., ICML 2021): 12 layers of width 192."""
    return vit(shape, classes, patch, 12, 3, 192)


def vit_small(shape: tuple[int, ...], classes: int, patch: Count = 16) -> nn.Module:
    """Build the small one (Touvron et al., ICML 2021): 12 layers of width 384."""
    return vit(shape, classes, patch, 12, 6, 384)


def vit_base(shape: tuple[int, ...], classes: int, patch: Count = 16) -> nn.Module:
    """Build the base one: 12 layers of width 768."""
    return vit(shape, classes, patch, 12, 12, 768)


def timm(shape: tuple[int, ...], classes: int, arch: str = "vit_small_patch16_224") -> nn.Module:
    """Build a network of timm's by its name there, for images of `shape`, without dropout."""
    load_torchvision("models")  # which timm imports
    try:
        import timm as library
        from timm.layers import set_fused_attn
    except ImportError:
        raise missing_extra("model=timm needs the package timm", "timm") from None
    channels, height, side = image(shape)
    set_fused_attn(False)  # vmap has no rule for its kernels
    options: Record = {"num_classes": classes, "in_chans": channels}
    if not library.is_model(arch):
        near = ", ".join(library.list_models(f"*{arch}*")[:3]) or "see timm.list_models()"
        raise ValueError(f"timm has no {arch}; it has {near}")
    if (
        "img_size" in getattr(library.model_entrypoint(arch), "__code__", vit.__code__).co_varnames
        or "vit" in arch
    ):
        options["img_size"] = (height, side)
    return library.create_model(arch, **options)
