"""One exchange: every rank's tiles of maps to every rank, by an all-gather that other work may overlap.

Each tile ends with a few values that say what it belongs to. Ranks that run different calls at the same time
(activation checkpointing on some of them only, say) then end with an error and not with wrong numbers. A CPU
looks at them when it has waited. The host of a GPU never waits for it: the GPU asserts them itself, and the
next call that waits for the GPU raises.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

__all__ = ["KINDS", "Exchange"]

KINDS = ("forward", "backward")
# fp32 holds integers below 2^24.
_DIGITS = 1 << 24
# Values that a tile ends with; 16 bytes, as its rows are aligned.
_TAG = 4
_DIFFER = (
    "ranks of a context must run the same calls in the same order, but {what}; is activation checkpointing "
    "on for some ranks only?"
)


class Exchange:
    """Tiles that this rank sends, and after `wait` everyone's.

    Args:
        kind: one of `KINDS`.
        tiles: tiles that every rank sends.
        heads: v heads.
        columns: of a tile, whose rows are 128.
        digest: what the ranks must agree on.
        device: of the tiles.
        group: process group, None for the default one; of no use unless `collective`.
        collective: whether to gather; else everyone's tiles are one's own.
        tagged: whether tiles carry their tag.
    """

    def __init__(
        self,
        kind: str,
        tiles: int,
        heads: int,
        columns: int,
        digest: int,
        device: torch.device,
        group: Any,
        *,
        collective: bool,
        tagged: bool = True,
    ):
        self._kind, self._group, self._collective = kind, group, collective
        self._shape = (heads, 128, columns)
        self._tagged, self._on_cpu = tagged and collective, device.type == "cpu"
        self._size = heads * 128 * columns + (_TAG if self._tagged else 0)
        # Zeros: what a tile of nobody's holds is sent too.
        self._message = torch.zeros((tiles, self._size), dtype=torch.float32, device=device)
        # On a GPU all in one value, which needs no copy from the host.
        self._tag = float(digest % (_DIGITS // 2) * 2 + KINDS.index(kind))
        if self._tagged and self._on_cpu:
            tag = (KINDS.index(kind), digest % _DIGITS, digest // _DIGITS, tiles)
            self._message[:, -_TAG:] = torch.tensor(tag, dtype=torch.float32, device=device)
        elif self._tagged:
            self._message[:, -_TAG:].fill_(self._tag)
        self._gathered = self._message
        self._work: Any = None
        self._received: torch.Tensor | None = None

    def tiles(self) -> torch.Tensor:
        """This rank's tiles, fp32 [tiles, HV, 128, columns], to be written before `start`."""
        return self._view(self._message)

    def start(self) -> None:
        """Sends the tiles and returns at once."""
        if self._collective:
            world = dist.get_world_size(self._group)
            self._gathered = self._message.new_empty((world * self._message.shape[0], self._size))
            self._work = _gather(self._gathered, self._message, self._group)

    def wait(self) -> torch.Tensor:
        """Everyone's tiles rank by rank, fp32 [world size * tiles, HV, 128, columns]; again at every call.

        Raises:
            RuntimeError: another rank is gone or late, or runs another call. On a GPU it comes later, where
                something waits for the GPU.
        """
        if self._received is None:
            self._received = self._receive()
        return self._received

    def _receive(self) -> torch.Tensor:
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self._tagged and self._on_cpu:
            self._check()
        elif self._tagged:
            same = (self._gathered[:, -1] == self._tag).all()
            torch._assert_async(same, _DIFFER.format(what="another rank runs another one"))
            # Kernels load tiles that follow each other.
            return self._view(self._gathered).contiguous()
        return self._view(self._gathered)

    def _view(self, tiles: torch.Tensor) -> torch.Tensor:
        heads, rows, columns = self._shape
        return tiles[:, : heads * rows * columns].view(-1, heads, rows, columns)

    def _check(self) -> None:
        mine, everyone = self._message[0, -_TAG:], self._gathered[:, -_TAG:]
        if bool((everyone == mine).all()):
            return
        tiles = self._message.shape[0]
        other = next(i for i in range(everyone.shape[0]) if not torch.equal(everyone[i], mine))
        kind = int(everyone[other, 0])
        runs = KINDS[kind] if 0 <= kind < len(KINDS) else "something else"
        if runs == self._kind:
            runs += " of another context"
        what = f"rank {other // tiles} of the group runs the {runs}"
        raise RuntimeError(_DIFFER.format(what=f"while this rank runs the {self._kind} of one, {what}"))


def _gather(out: torch.Tensor, x: torch.Tensor, group: Any) -> Any:
    # torch 2.13 has a new name for it and warns of the old one, which is the only one before.
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(out, x, group=group, async_op=True)
