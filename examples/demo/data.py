"""Text that every Python installation has: the standard library's own sources, in whole files."""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

VOCABULARY = 256
BORDER = 0  # a byte that no source file holds: it starts every document and is what follows its last byte
SKIP = {"__pycache__", "dist-packages", "site-packages"}


@dataclass(frozen=True)
class Pack:
    """Several documents, one after another.

    tokens, targets (Tensor): `[T]`, int64; the byte at each position and the one after it in its document.
    position (Tensor): `[T]`, int64; distance from the start of the document.
    bounds (Tensor): `[N + 1]`, int64, always on the CPU; where the documents start, and T.
    """

    tokens: Tensor
    targets: Tensor
    position: Tensor
    bounds: Tensor

    def to(self, device: torch.device) -> Pack:
        return Pack(
            self.tokens.to(device, non_blocking=True),
            self.targets.to(device, non_blocking=True),
            self.position.to(device, non_blocking=True),
            self.bounds,
        )


def read_sources(longest: int) -> tuple[list[bytes], list[bytes]]:
    """The standard library's sources below `longest` bytes: (to train on, held out: one file in twenty)."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts = []
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        if SKIP.isdisjoint(path.relative_to(root).parts):
            text = path.read_bytes()
            if 64 <= len(text) < longest and BORDER not in text:
                texts.append(text)
    if len(texts) < 20:
        raise RuntimeError(
            f"expected at least 20 source files of the standard library under {root}, got {len(texts)}"
        )
    return [t for i, t in enumerate(texts) if i % 20 != 7], texts[7::20]


def pack(texts: list[bytes]) -> Pack:
    """One pack of these documents."""
    flat, following, position, bounds = [], [], [], [0]
    for text in texts:
        flat += [BORDER, *text]
        following += [*text, BORDER]
        position += range(len(text) + 1)
        bounds.append(len(flat))
    return Pack(*(torch.tensor(column, dtype=torch.int64) for column in (flat, following, position, bounds)))


def packs(texts: list[bytes], tokens: int, seed: int) -> Iterator[Pack]:
    """Packs of at most `tokens` tokens, for ever, in an order that the seed decides."""
    order = random.Random(seed)
    waiting: list[bytes] = []
    used = 0
    while True:
        for text in order.sample(texts, len(texts)):
            if used + len(text) + 1 > tokens:
                yield pack(waiting)
                waiting, used = [], 0
            waiting.append(text)
            used += len(text) + 1
