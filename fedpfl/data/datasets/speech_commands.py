"""Speech Commands: one spoken word a second, as logarithmic mel spectrograms."""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np

from fedpfl.data.datasets.shared.samples import Raw, number_groups
from fedpfl.data.datasets.shared.source import (
    Source,
    explain_read_errors,
    not_as_published,
    read_cached,
    require_count,
    unpacked_folder,
)

URL = "https://storage.googleapis.com/download.tensorflow.org/data/speech_commands_v0.02.tar.gz"
MD5 = "6b74f3901214cb2c2934e98196829835"  # torchaudio's and the server's own
RATE = 16_000
WINDOW = 1024
HOP = 512
BANDS = 32
FILES = 105_829


def speech_commands(source: Source) -> Raw:
    """Read version 0.02 (Warden 2018): 35 words, float32 `[1, 32, 32]` (band, time), in order of
    the published lists: training, validation, test. Groups are the speakers.

    Clips are cut or filled up with silence to one second. 32 mel bands from 20 Hz to 8 kHz, windows
    of 64 ms every 32 ms, natural logarithm of the power plus 1e-6.
    """
    base = "SpeechCommands/speech_commands_v0.02"
    archive = "speech_commands_v0.02.tar.gz"
    with unpacked_folder(source, base, archive, (MD5,), (URL,), flat=True) as root:
        paths = sorted(
            path for path in root.glob("*/*.wav") if not path.parent.name.startswith("_")
        )
        return read_cached(source, paths, lambda: _read_clips(root, paths))


def _read_clips(root: Path, paths: list[Path]) -> Raw:
    part = {path.relative_to(root).as_posix(): 0 for path in paths}
    for number, list_name in ((1, "validation_list.txt"), (2, "testing_list.txt")):
        with explain_read_errors(root / list_name, not_as_published):
            for entry in (root / list_name).read_text(encoding="utf-8").split():
                part[entry] = number
    require_count(root, "clips and names of clips", len(part), FILES)
    # By part, then by name: training, validation, test.
    names = sorted(part, key=lambda name: (part[name], name))
    kinds, _ = number_groups([name.split("/")[0] for name in names])
    filters = mel_filters()
    x = np.stack([log_mel_spectrogram(_read_clip(root / name), filters) for name in names])[:, None]
    speakers, people = number_groups([Path(name).name.split("_")[0] for name in names])
    test_from = sum(number < 2 for number in part.values())
    return Raw(x, kinds, speakers, people, test_from)


def _read_clip(path: Path) -> np.ndarray:
    """A second of a file of 16-bit samples, float32 from -1 to 1."""
    with explain_read_errors(path, not_as_published), wave.open(str(path), "rb") as sound:
        form = (sound.getnchannels(), sound.getsampwidth(), sound.getframerate())
        frames = min(sound.getnframes(), RATE)
        data = sound.readframes(RATE)
        if form != (1, 2, RATE) or not frames or len(data) != 2 * frames:
            raise ValueError(
                f"{len(data)} bytes of {frames} samples, with channels, bytes a sample and rate "
                f"{form}, where (1, 2, {RATE}) are published"
            )
    return np.pad(np.frombuffer(data, "<i2").astype(np.float32) / 32768, (0, RATE - len(data) // 2))


def log_mel_spectrogram(clip: np.ndarray, filters: np.ndarray) -> np.ndarray:
    """Return the spectrogram `[bands, times]` of a clip `[RATE]`.

    The clip's ends are mirrored so that windows are centred on every HOP samples.
    """
    mirrored = np.pad(clip, WINDOW // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(mirrored, WINDOW)[::HOP]
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)
    power = np.abs(np.fft.rfft(frames * hann, axis=1)) ** 2
    return np.log(filters @ power.T + 1e-6).astype(np.float32)


def mel_filters() -> np.ndarray:
    """Return triangles of height 1, `[bands, bins]`.

    Their corners are at equal steps of mel = 2595 log10(1 + f / 700).
    """
    low, high = (2595 * np.log10(1 + hertz / 700) for hertz in (20, RATE / 2))
    corners = 700 * (10 ** (np.linspace(low, high, BANDS + 2) / 2595) - 1)
    bins = np.fft.rfftfreq(WINDOW, 1 / RATE)
    rising = (bins - corners[:-2, None]) / np.diff(corners)[:-1, None]
    falling = (corners[2:, None] - bins) / np.diff(corners)[1:, None]
    return np.maximum(0, np.minimum(rising, falling))
