"""What an op tells ``cake bench``: its shapes, who can run them, and how much work they are. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

#: fwd: without gradients. fwd_train: with them, so with a tape. bwd: from the gradients of the outputs.
Pass = Literal["fwd", "fwd_train", "bwd", "fwd+bwd"]
PASSES: tuple[Pass, ...] = ("fwd", "fwd_train", "bwd", "fwd+bwd")


@dataclass(frozen=True)
class Shape:
    """A named problem: ``heads`` of q/k and of v, and the lengths of the packed sequences in tokens."""

    name: str
    heads: tuple[int, int]
    lengths: tuple[int, ...]
    #: Small enough for a CPU; on a GPU it runs only where it is asked for by name.
    tiny: bool = False
    #: Long enough for several ranks; on one it runs only where it is asked for by name.
    spread: bool = False

    @property
    def tokens(self) -> int:
        """All tokens."""
        return sum(self.lengths)

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Cumulative boundaries ``(0, ..., tokens)``."""
        return tuple(accumulate(self.lengths, initial=0))

    def __str__(self) -> str:
        return f"{self.name} {self.heads} {'+'.join(map(str, self.lengths))}"


@dataclass
class Inputs:
    """The tensors of one shape, the same for every arm."""

    shape: Shape
    #: By name. Gradients are taken with respect to those that require them.
    tensors: dict[str, torch.Tensor]
    #: Gradients of the arm's outputs, in their order; None for an output that the loss doesn't use.
    output_gradients: tuple[torch.Tensor | None, ...]

    @property
    def leaves(self) -> dict[str, torch.Tensor]:
        """The tensors that require gradients."""
        return {name: x for name, x in self.tensors.items() if x.requires_grad}


#: One forward call: outputs from inputs.
Call = Callable[[Inputs], Sequence["torch.Tensor | None"]]


@dataclass(frozen=True)
class Arm:
    """One implementation under test. ``load`` imports it, and may raise anything where it can't be used."""

    name: str
    load: Callable[[], Call]
    #: Ways of keeping the tape; each is measured for the passes that have one.
    modes: tuple[str | None, ...] = (None,)
    #: Keywords of ``cake.core.configure`` in which a mode's calls run; None leaves the process's own.
    configuration: Callable[[str | None], Mapping[str, Any]] | None = None
    #: Someone else's: run when named in ``--vs``, and its absence is no failure.
    peer: bool = False
    #: Has no backward: its outputs alone are checked, and the pass "fwd" alone is measured.
    forward_only: bool = False
    #: ``under(context, layout)``: the calls of a rank under a ``cake.core.cp.KcpContext`` of that layout, on
    #: inputs of its own tokens; None: it runs on one rank alone. May raise anything where it can't be used.
    under: Callable[[Any, str], Call] | None = None


@dataclass(frozen=True)
class Work:
    """The least that a pass must do: operations of the matrix unit, and bytes of device memory moved."""

    flops: float
    nbytes: float


@dataclass(frozen=True)
class Ceilings:
    """What a GPU was measured to do: bytes per second of a copy (read and written), bf16 matmul FLOPs."""

    nbytes_per_s: float
    flops_per_s: float

    def fractions(self, work: Work, ms: float) -> tuple[float, float]:
        """What a kernel that does `work` in `ms` milliseconds reaches of the copy's and the matmul's rate."""
        return 1e3 * work.nbytes / ms / self.nbytes_per_s, 1e3 * work.flops / ms / self.flops_per_s

    def floor_ms(self, *work: Work) -> float:
        """Milliseconds below which works that run one after the other can't go: the larger term of each."""
        seconds = [max(w.flops / self.flops_per_s, w.nbytes / self.nbytes_per_s) for w in work]
        return 1e3 * sum(seconds)


#: Measured with a large device-to-device copy and an 8192^3 bf16 product.
CEILINGS: Mapping[str, Ceilings] = {"NVIDIA H200": Ceilings(nbytes_per_s=4.3e12, flops_per_s=790e12)}


@dataclass(frozen=True)
class Bench:
    """What an op's ``OpSpec.bench`` names."""

    op: str
    shapes: tuple[Shape, ...]
    arms: tuple[Arm, ...]
    #: ``inputs(shape, device, seed)``
    inputs: Callable[[Shape, torch.device, int], Inputs]
    #: ``work(shape, pass, mode)`` of the passes fwd, fwd_train and bwd, for the floor.
    work: Callable[[Shape, Pass, str | None], Work] | None = None
    #: ``kernel_work(shape, name)`` of one launch of a kernel of the op's own, by the name that the profiler
    #: gives it; None for one whose work depends on values, or that isn't the op's.
    kernel_work: Callable[[Shape, str], Work | None] | None = None
    #: The true outputs and gradients: ``output0``, ..., and ``d<name>`` of each tensor that requires one.
    #: Where the shape is small enough every arm is checked against them; elsewhere against the first arm.
    reference: Callable[[Inputs], Mapping[str, torch.Tensor]] | None = None
    #: Tokens of a shape up to which ``reference`` is used.
    reference_tokens: int = 0
    #: Largest relative L2 error of an output or gradient between two arms.
    limit: float = 2e-2
    #: Distributions whose versions belong into the header.
    distributions: tuple[str, ...] = ()
    _by_name: Mapping[str, Shape] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {shape.name: shape for shape in self.shapes})

    def shape(self, name: str) -> Shape:
        """The shape of a name.

        Raises:
            ValueError: There is none; the message lists those there are.
        """
        if name not in self._by_name:
            raise ValueError(f"shapes of {self.op!r} are {', '.join(self._by_name)}, got {name!r}")
        return self._by_name[name]

    def default_shapes(self, device_type: str, *, spread: bool = False) -> tuple[Shape, ...]:
        """Every shape of the size that suits the device, for several ranks (`spread`) or for one."""
        if device_type == "cpu":
            return tuple(shape for shape in self.shapes if shape.tiny)
        return tuple(shape for shape in self.shapes if not shape.tiny and shape.spread == spread)
