"""The text and its batches. The data order is a function of (seed, step), so a resumed run sees the same one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cula.demo.config import MINIMUM_WINDOWS, DemoConfig
from cula.host.errors import RangeError

#: Windows that a validation looks at, at most, and how many of them at a time.
VALIDATION_WINDOWS = 128
VALIDATION_BATCH = 32


@dataclass(frozen=True)
class Corpus:
    """A text cut in two. train, validation: uint8 tensors on the CPU; name: for people; sha256: of all bytes."""

    train: Tensor
    validation: Tensor
    name: str
    sha256: str


def documentation() -> bytes:
    """The documentation topics that ship with CPython, every paragraph once (topics quote each other)."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise RangeError("this Python ships no documentation topics: name a text file with --file") from None
    seen: set[str] = set()
    kept: list[str] = []
    for name in sorted(topics):
        for paragraph in topics[name].split("\n\n"):
            if paragraph.strip() and paragraph not in seen:
                seen.add(paragraph)
                kept.append(paragraph.strip("\n"))
    return "\n\n".join(kept).encode()


def read_file(path: str) -> bytes:
    """The bytes of a file; RangeError says what is wrong with the path."""
    place = Path(path)
    if not place.exists():
        raise RangeError(f"--file {path} does not exist: name a text file, or leave --file out")
    if not place.is_file():
        raise RangeError(f"--file {path} is not a file: name a text file, or leave --file out")
    try:
        return place.read_bytes()
    except OSError as error:
        raise RangeError(f"--file {path} cannot be read ({error.strerror}): name another text file") from None


def load(config: DemoConfig) -> Corpus:
    """The corpus of `config`: 95 % for training, the end for validation.

    RangeError where the text is too short or is not the one that the checkpoint was trained on.
    """
    data = documentation() if config.file is None else read_file(config.file)
    name = "Python documentation topics" if config.file is None else config.file
    needed = MINIMUM_WINDOWS * (config.context + 1)
    if len(data) < needed:
        raise RangeError(
            f"{name} has {len(data)} bytes, context {config.context} needs at least {needed}: "
            "name a longer text with --file, or a smaller --context"
        )
    sha256 = hashlib.sha256(data).hexdigest()
    if config.text and config.text != sha256:
        raise RangeError(f"{name} has changed since the checkpoint was written: start anew without --resume")
    tokens = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    cut = min(len(data) * 95 // 100, len(data) - 2 * (config.context + 1))
    return Corpus(tokens[:cut], tokens[cut:], name, sha256)


def batch(corpus: Corpus, config: DemoConfig, step: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, int64 [batch, context] each, of training step `step`: random windows."""
    generator = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
    starts = torch.randint(len(corpus.train) - config.context, (config.batch,), generator=generator)
    windows = corpus.train[starts[:, None] + torch.arange(config.context + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def validation(corpus: Corpus, config: DemoConfig) -> Iterator[tuple[Tensor, Tensor]]:
    """The validation windows, in batches: all of them, or VALIDATION_WINDOWS spread evenly over a long text.

    Always the same ones, so that the losses of one run can be compared.
    """
    size = config.context
    windows = (len(corpus.validation) - 1) // size
    count = min(windows, VALIDATION_WINDOWS)
    starts = torch.arange(count) * windows // count * size
    for part in starts.split(VALIDATION_BATCH):
        found = corpus.validation[part[:, None] + torch.arange(size + 1)].long()
        yield found[:, :-1], found[:, 1:]
