"""What an op tells ``cake verify``: cases, how to call it on them, and the truth. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["Case", "Given", "Verify"]


@dataclass
class Given:
    """One call: inputs and a loss on its results."""

    #: By name. Gradients are taken with respect to those that require them.
    tensors: dict[str, torch.Tensor]
    #: The gradient of each result that the loss uses, by the result's name.
    loss: dict[str, torch.Tensor]
    #: Everything else that the call is given.
    arguments: dict[str, Any] = field(default_factory=dict)
    #: Of packed sequences, 0 to the number of tokens; None where every row is one.
    boundaries: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Case:
    """A named problem. ``make(device, seed)`` gives the same values on every device."""

    name: str
    make: Callable[[torch.device, int], Given]
    #: By tensor, where this case has another limit than the op.
    limits: Mapping[str, float] = field(default_factory=dict)
    #: By tensor, the root mean square below which its reference counts as if it had this one.
    least_rms: Mapping[str, float] = field(default_factory=dict)
    #: Whether the bits of several calls are compared on it, too.
    bits: bool = False


@dataclass(frozen=True)
class Verify:
    """What an op's ``OpSpec.verify`` names."""

    op: str
    cases: tuple[Case, ...]
    #: ``call(given, variant, tape)``: results by name.
    call: Callable[[Given, str, str], Mapping[str, torch.Tensor]]
    #: The true results, and gradients ``d<name>`` of the tensors that require one, in FP64.
    reference: Callable[[Given], Mapping[str, torch.Tensor]]
    #: Largest relative L2 error by name, of a tensor; twice it of a sequence and of a block of 64 tokens.
    limits: Mapping[str, float]
    #: Results and gradients with one entry per sequence.
    states: tuple[str, ...] = ()
    #: Gradients with neither tokens nor sequences.
    whole: tuple[str, ...] = ()
    #: Ways of keeping the tape, the first the default: all must give the same bits.
    tapes: tuple[str, ...] = ("save",)

    def case(self, name: str) -> Case:
        """The case of a name.

        Raises:
            ValueError: There is none; the message lists those there are.
        """
        for case in self.cases:
            if case.name == name:
                return case
        known = ", ".join(repr(case.name) for case in self.cases)
        raise ValueError(f"cases of {self.op!r} are {known}, got {name!r}")
