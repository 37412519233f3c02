"""CIFAR-10-C: its files, and the published recipe beside plain definitions, image by image."""

import colorsys
import io
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.ndimage import gaussian_filter, zoom

from fedpfl.data import fingerprint
from fedpfl.data.datasets import cifar10_c, load_samples
from fedpfl.data.datasets.shared import corruptions
from fedpfl.data.datasets.shared.corruptions import RECIPES, SEVERITY_PARAMETERS, corrupt_images
from tests.data.promises import assert_promises, one_line
from tests.data.test_datasets import corrupt, md5

RNG = np.random.default_rng(0)
SMOOTH = gaussian_filter(RNG.random((6, 32, 32, 3)), (0, 3, 3, 0))
SMOOTH = (255 * (SMOOTH - SMOOTH.min()) / np.ptp(SMOOTH)).astype(np.uint8)
GREY = np.full((4, 32, 32, 3), 128, np.uint8)
X = SMOOTH / 255.0


def rng() -> np.random.Generator:
    return np.random.default_rng(5)


def test_which_of_the_fifteen_are_offered():
    assert set(cifar10_c.MAIN_CORRUPTIONS) - set(RECIPES) == {"frost"}
    assert set(RECIPES) < set(cifar10_c.MAIN_CORRUPTIONS)
    # The published ones
    assert fingerprint(SEVERITY_PARAMETERS) == "fc139f2d20af7b2ed630ebc5431f9d8f"


@pytest.mark.parametrize("name", RECIPES)
def test_a_corruption_is_a_pure_function_that_grows_with_severity(name):
    before = SMOOTH.copy()
    first = corrupt_images(SMOOTH, name, 1, 0)
    assert first.dtype == np.uint8
    assert first.shape == SMOOTH.shape
    assert np.array_equal(SMOOTH, before)
    assert np.array_equal(first, corrupt_images(SMOOTH, name, 1, 0))
    change = [abs(corrupt_images(SMOOTH, name, s, 0).astype(float) - SMOOTH).mean() for s in (1, 5)]
    assert change[0] > 0
    if name not in ("elastic_transform", "glass_blur"):  # whose published numbers do not rise
        assert change[1] > change[0]
    is_drawn = "noise" in name or name.startswith(("glass", "motion", "snow", "fog", "elastic"))
    assert np.array_equal(first, corrupt_images(SMOOTH, name, 1, 1)) != is_drawn


def test_chunks_do_not_repeat_each_other(monkeypatch):
    monkeypatch.setattr(corruptions, "IMAGES_PER_CHUNK", 2)
    got = corrupt_images(GREY, "gaussian_noise", 3, 0)
    assert not np.array_equal(got[:2], got[2:])


def test_noise_has_the_published_strengths():
    many = np.full((200, 32, 32, 3), 128, np.uint8)
    for severity, spread, photons, share in ((1, 0.04, 500, 0.01), (5, 0.10, 50, 0.07)):
        gaussian, shot, impulse = (
            corrupt_images(many, f"{name}_noise", severity, 0)
            for name in ("gaussian", "shot", "impulse")
        )
        assert gaussian.std() / 255 == pytest.approx(spread, rel=0.01)
        expected = (128 / 255 / photons) ** 0.5
        assert shot.std() / 255 == pytest.approx(expected, rel=0.03)  # fractions are cut off
        assert (impulse == 0).mean() == pytest.approx(share / 2, rel=0.05)
        assert (impulse == 255).mean() == pytest.approx(share / 2, rel=0.05)
        assert {*np.unique(impulse)} == {0, 128, 255}


def test_defocus_blur():
    c = RECIPES["defocus_blur"][1][0]
    radius, blur = c
    weights = {}
    for down in range(-4, 5):  # a disc, blurred by a 3 x 3 bell
        for across in range(-4, 5):
            total = 0.0
            for i in (-1, 0, 1):
                for j in (-1, 0, 1):
                    if (down - i) ** 2 + (across - j) ** 2 <= radius**2:
                        total += np.exp(-(i * i + j * j) / (2 * blur**2))
            weights[down, across] = total
    whole = sum(weights.values())
    got = corruptions.defocus_blur(X, c, rng())
    for row, column in ((0, 0), (1, 30), (15, 16), (31, 31)):
        expected = np.zeros(3)
        for (down, across), weight in weights.items():
            i, j = abs(row + down), abs(column + across)  # mirrored at the border's pixels
            expected += weight / whole * X[2, min(i, 62 - i), min(j, 62 - j)]
        np.testing.assert_allclose(got[2, row, column], expected, atol=1e-12)


def test_zoom_blur():
    c = RECIPES["zoom_blur"][1][0]
    image = X[1].astype(np.float32)
    total, factors = image.copy(), np.arange(1, c, 0.01)
    for factor in factors:
        crop = int(np.ceil(32 / factor))
        top = (32 - crop) // 2
        large = zoom(image[top : top + crop, top : top + crop], (factor, factor, 1), order=1)
        trim = (len(large) - 32) // 2
        total += large[trim : trim + 32, trim : trim + 32]
    got = corruptions.zoom_blur(X, c, rng())
    np.testing.assert_allclose(got[1], total / (len(factors) + 1), atol=1e-5)


def test_glass_blur():
    """With the same random numbers, one image after another, as the recipe writes it."""
    c = sigma, reach, times = RECIPES["glass_blur"][1][0]
    stream = rng()
    draws = [
        stream.integers(-reach, reach, size=(2, len(X)))
        for _ in range(times * (32 - 2 * reach) ** 2)
    ]
    got = corruptions.glass_blur(X, c, rng())
    for number in (0, 3):
        image = np.uint8(gaussian_filter(X[number], (sigma, sigma, 0), mode="nearest") * 255)
        moves = iter(draws)
        for _ in range(times):
            for row in range(32 - reach, reach, -1):
                for column in range(32 - reach, reach, -1):
                    across, down = next(moves)[:, number]
                    a, b = (row, column), (row + down, column + across)
                    # Of views, so the second is copied over the first
                    image[a], image[b] = image[b], image[a]
        expected = gaussian_filter(image / 255, (sigma, sigma, 0), mode="nearest")
        np.testing.assert_allclose(got[number], expected, atol=1e-9)


def test_fog():
    got = corruptions.fog(X, (0.5, 3), rng())
    clouds = corruptions._plasma_clouds(len(X), 3, rng())
    assert clouds.shape == (6, 32, 32)
    assert (clouds.min((1, 2)) == 0).all()
    assert (clouds.max((1, 2)) == 1).all()
    for image, fogged, cloud in zip(X, got, clouds, strict=True):
        expected = (image + 0.5 * cloud[..., None]) * image.max() / (image.max() + 0.5)
        np.testing.assert_allclose(fogged, expected)
    wrapped = np.concatenate([clouds, clouds[:, :1]], 1)
    jump, step = abs(wrapped[:, -1] - wrapped[:, -2]).mean(), abs(np.diff(clouds, axis=1)).mean()
    assert jump < 2 * step  # on a torus the last row neighbours the first
    rough, even = (corruptions._plasma_clouds(50, decay, rng()) for decay in (1.75, 3))
    assert abs(np.diff(rough, axis=1)).mean() > 1.2 * abs(np.diff(even, axis=1)).mean()


def test_brightness_by_hsv():
    x = X.copy()
    x[0, 0, 0], x[0, 0, 1] = 0, 1
    got = corruptions.brightness(x, 0.3, rng())
    for number, row, column in ((0, 0, 0), (0, 0, 1), (0, 5, 7), (1, 31, 2), (4, 16, 16)):
        hue, saturation, value = colorsys.rgb_to_hsv(*x[number, row, column])
        expected = colorsys.hsv_to_rgb(hue, saturation, min(1, value + 0.3))
        np.testing.assert_allclose(got[number, row, column], expected, atol=1e-12)


def test_pixelate_and_jpeg_are_pils():
    for severity, quality, share in ((1, 80, 0.95), (5, 40, 0.65)):
        coarse, packed = (
            corrupt_images(SMOOTH, name, severity, 0) for name in ("pixelate", "jpeg_compression")
        )
        image, data = Image.fromarray(SMOOTH[3]), io.BytesIO()
        small = image.resize((int(32 * share), int(32 * share)), Image.Resampling.BOX)
        assert np.array_equal(coarse[3], small.resize((32, 32), Image.Resampling.BOX))
        image.save(data, "JPEG", quality=quality)
        assert np.array_equal(packed[3], Image.open(data))


def test_motion_blur_runs_along_its_angle():
    spot = np.zeros((3, 32, 32, 1))
    spot[:, 16, 16] = 1
    got = corruptions._blur_along_line(spot, 6, 2, np.array([0.0, -45.0, -90.0]))[..., 0]
    np.testing.assert_allclose(got.sum((1, 2)), 1)
    bell = np.exp(-(np.arange(13) ** 2) / 8)
    np.testing.assert_allclose(got[0, 16, 4:17][::-1], bell / bell.sum())
    # Down and to the left
    assert {row + column for row, column in np.argwhere(got[1] > 1e-9)} == {32}
    np.testing.assert_allclose(got[2, 16:29, 16], bell / bell.sum())


def test_elastic_transform_of_nothing_moves_nothing():
    np.testing.assert_allclose(corruptions.elastic_transform(X, (0, 0, 0), rng()), X, atol=1e-9)
    rows, columns = np.meshgrid(np.arange(32.0), np.arange(32.0), indexing="ij")
    ramp = np.stack([rows, columns, rows + columns], -1)[None] / 62
    moved = corruptions.elastic_transform(np.repeat(ramp, 20, 0), (0, 0, 0.08), rng())
    moved = moved[:, 8:24, 8:24]
    bends = np.diff(moved, n=2, axis=1), np.diff(moved, n=2, axis=2)
    assert max(abs(bend).max() for bend in bends) < 1e-9  # affine
    assert 0.2 < abs(moved - ramp[:, 8:24, 8:24])[..., :2].max() * 62 < 10
    rows, columns = np.full((6, 32, 32), -1.0), np.full((6, 32, 32), 4.5)
    for border, beyond in (("mirror", 1), ("reflect", 0)):
        outside = corruptions._sample_bilinear(X, rows, columns, border)
        np.testing.assert_allclose(outside[:, 0, 0], (X[:, beyond, 4] + X[:, beyond, 5]) / 2)


@pytest.fixture
def published(tmp_path, monkeypatch):
    """Seven images at five severities, some corruptions; the sums are those of these files."""
    monkeypatch.setattr(cifar10_c, "IMAGES_PER_SEVERITY", 7)
    root = tmp_path / "CIFAR-10-C"
    root.mkdir()
    labels = np.tile(np.arange(7, dtype=np.uint8), 5)
    arrays = {"labels": labels} | {
        name: RNG.integers(0, 256, (35, 32, 32, 3), dtype=np.uint8)
        for name in cifar10_c.MAIN_CORRUPTIONS
    }
    for name, array in arrays.items():
        np.save(root / f"{name}.npy", array)
    digests = {name: md5((root / f"{name}.npy").read_bytes()) for name in arrays}
    monkeypatch.setattr(cifar10_c, "LABELS_MD5", digests["labels"])
    monkeypatch.setattr(cifar10_c, "MD5", digests)
    return root, arrays


def test_published_files(tmp_path, published, monkeypatch):
    root, arrays = published
    two = {"corruptions": ("fog", "snow"), "severity": 2}
    got = load_samples("cifar10_c", tmp_path, **two)
    assert got.x.shape == (14, 3, 32, 32)
    assert got.group_names == ("fog", "snow")
    assert got.groups.tolist() == [0] * 7 + [1] * 7
    assert got.y.tolist() == [*range(7)] * 2
    assert np.array_equal(got.x[7:], arrays["snow"][7:14].transpose(0, 3, 1, 2))
    assert_promises("cifar10_c", tmp_path, **two)
    whole = load_samples("cifar10_c", tmp_path, severity=None)
    assert len(whole.y) == 15 * 35
    assert whole.group_names == cifar10_c.MAIN_CORRUPTIONS
    assert np.array_equal(whole.x[35:70], arrays["shot_noise"].transpose(0, 3, 1, 2))
    assert whole.groups[35:70].tolist() == [1] * 35
    assert whole.y[35:70].tolist() == [*range(7)] * 5
    with tarfile.open(tmp_path / "CIFAR-10-C.tar", "w") as tar:
        tar.add(root, "CIFAR-10-C")
    monkeypatch.setattr(cifar10_c, "TAR_MD5", md5((tmp_path / "CIFAR-10-C.tar").read_bytes()))
    root.rename(tmp_path / "elsewhere")
    assert torch.equal(load_samples("cifar10_c", tmp_path, **two).x, got.x)


def test_each_image_once(tmp_path, published):
    _, arrays = published
    once = {"once": True, "classes": 7}
    got = load_samples("cifar10_c", tmp_path, corruptions=("fog", "snow"), severity=2, **once)
    assert got.x.shape == (7, 3, 32, 32)
    assert got.groups.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert got.y.tolist() == [0, 2, 4, 6, 1, 3, 5]
    assert np.array_equal(got.x[4:], arrays["snow"][[8, 10, 12]].transpose(0, 3, 1, 2))
    every = load_samples("cifar10_c", tmp_path, corruptions=("fog",), severity=None, **once)
    assert every.y.tolist() == [0, 5, 1, 6, 2, 3, 4]


def test_errors_in_files(tmp_path, published, monkeypatch):
    root, _ = published
    path = root / "fog.npy"
    path.write_bytes(path.read_bytes()[:-5])
    assert corrupt("cifar10_c", tmp_path).startswith("fog.npy: md5 is")
    np.save(path, np.array([None]))
    monkeypatch.setitem(cifar10_c.MD5, "fog", md5(path.read_bytes()))
    assert corrupt("cifar10_c", tmp_path).startswith("fog.npy: ")
    path.unlink()
    assert corrupt("cifar10_c", tmp_path).startswith("CIFAR-10-C: fog.npy is missing")


def clean(folder, **more) -> np.ndarray:
    x = RNG.integers(0, 256, (12, 3, 32, 32), dtype=np.uint8)
    np.savez(folder / "cifar10.npz", x=x, y=np.arange(12) % 10, **more)
    return x


def test_made_from_cifar10(tmp_path, monkeypatch):
    # So that the training images are the first 10
    monkeypatch.setattr(cifar10_c, "IMAGES_PER_SEVERITY", 2)
    x = clean(tmp_path)
    made = {"made": True, "classes": 10}
    both = {"corruptions": ("contrast", "fog"), "severity": None, **made}
    got = load_samples("cifar10_c", tmp_path, **both)
    assert got.group_names == ("contrast", "fog")
    assert got.y.tolist() == [0, 1] * 10
    images = x[10:].transpose(0, 2, 3, 1)
    for place, name in enumerate(got.group_names):
        for severity in range(1, 6):
            start = 10 * place + 2 * (severity - 1)
            expected = corrupt_images(images, name, severity, cifar10_c.SEED).transpose(0, 3, 1, 2)
            assert np.array_equal(got.x[start : start + 2], expected)
    assert len(list((tmp_path / "cache").iterdir())) == 10
    assert_promises("cifar10_c", tmp_path, "has_all_classes", **both)
    with monkeypatch.context() as patch:
        patch.setattr(corruptions, "corrupt_images", None)
        again = load_samples("cifar10_c", tmp_path, corruptions=("fog",), severity=3, **made)
    assert torch.equal(again.x, got.x[14:16])
    assert len(load_samples("cifar10_c", tmp_path, **made).group_names) == 14


def test_made_needs_the_test_images(tmp_path, monkeypatch):
    monkeypatch.setattr(cifar10_c, "IMAGES_PER_SEVERITY", 2)
    message = one_line(lambda: load_samples("cifar10_c", tmp_path, made=True, download=False))
    assert "data set cifar10 is not in data_dir=" in message
    assert "put cifar-10-python.tar.gz (or cifar-10-batches-py/, unpacked) there" in message
    clean(tmp_path, test_from=11)
    message = one_line(lambda: load_samples("cifar10_c", tmp_path, made=True))
    assert "cifar10.npz is not as published: dataset.made needs CIFAR-10's 2 test images" in message
