"""Sequences, chunks and tape slots of a call (`cake.core.sequences`), and the op's head dimension."""

from __future__ import annotations

from cake.core.sequences import CHUNK, Sequences, batched, packed, packed_on_device

__all__ = ["CHUNK", "HEAD_DIM", "Sequences", "batched", "packed", "packed_on_device"]

HEAD_DIM = 128
