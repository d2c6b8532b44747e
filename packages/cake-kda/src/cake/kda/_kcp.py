"""A call under a context as a node of autograd: the op's stages, walked as `cake.core.cp` says.

What is saved follows the call's tape as on a single rank, with a tape of states for each role or for all
sequences at once. Whatever it is, the states that entered from other ranks and the maps that the backward
merges with are saved too: the backward makes one exchange of its own and repeats none.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import torch

from cake.core import cp
from cake.core.calls import differentiated_once, refuse_tangents
from cake.core.checks import check_saved, saved_as
from cake.core.launch import loadable, running_on
from cake.core.sequences import Sequences
from cake.kda import _route, _segments, _stages
from cake.kda._autograd import Call, Tensors
from cake.kda._stages import Prep

FP32 = torch.float32
_INPUTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")
# What a walk leaves: of each role, or of all sequences at once.
_TAPES = (*cp.ROLES, "all", "m", "live")


# No tracer sees an exchange.
@cp.untraced
def run(tensors: Tensors, call: Call, context: cp.Call) -> torch.Tensor:
    """The output, on the graph if a backward can follow."""
    refuse_tangents(_INPUTS, _inputs(tensors))  # the exchange carries none
    if call.seqs.total:
        _route.note(call.route)
    if not call.differentiable:
        return _forward(tensors, call, context, save=False)[0]
    apply: Any = _UnderContext.apply
    o: torch.Tensor = apply(*_inputs(tensors), call, context)
    return o


class _UnderContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> torch.Tensor:
        *inputs, call, context = arguments
        tensors = _tensors(inputs)
        o, prep, made = _forward(tensors, call, context, save=call.route.tape != "inputs")
        saved: dict[str, torch.Tensor | None] = dict(zip(_INPUTS, inputs, strict=True))
        saved |= {"maps": made.maps, **made.tapes}
        # Only walking again needs their values.
        saved["entering"] = made.entering if call.route.tape == "inputs" else None
        if prep is not None and call.route.tape == "all":
            saved |= {f"prep.{name}": x for name, x in prep._asdict().items()}
        ctx.call, ctx.context = call, context
        ctx.made = dict(zip(saved, saved_as(saved.values()), strict=True))
        ctx.save_for_backward(*saved.values())
        return o

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, do: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: Call = ctx.call
        plan = ctx.context.plan
        saved: dict[str, Any] = dict(zip(ctx.made, ctx.saved_tensors, strict=True))
        for name, made in ctx.made.items():
            if made is not None:
                check_saved(name, saved[name], *made)
        x = _tensors([saved[name] for name in _INPUTS])
        stages = _stages.stages(call.route.backend)
        with running_on(x.v.device):
            if "prep.t" in saved:
                prep: Prep | None = Prep(**{name: saved[f"prep.{name}"] for name in Prep._fields})
            else:
                prep = _prepare(stages, x, call, ctx.context)
            tapes = {name: saved[name] for name in _TAPES if name in saved}
            made = cp.Forward(tapes=tapes, entering=saved["entering"], maps=saved["maps"])
            if _in_parts(stages):
                walks = _Walks(stages, call, x, prep, do=loadable(do))
                cp.backward(plan, walks, ctx.context.group, made)
                grads = walks.input_gradients()
            else:
                joint = _joint_walks(stages, call, x, prep, do=loadable(do))
                cp.backward_jointly(plan, joint, ctx.context.group, made, rates=_segments.RATES)
                *of_tokens, partials = joint.gradients
                grads = _input_gradients(stages, x, of_tokens, partials)
        wanted = ctx.needs_input_grad
        return (*(grad if need else None for grad, need in zip(grads, wanted, strict=False)), None, None)


def _inputs(x: Tensors) -> tuple[torch.Tensor | None, ...]:
    return x.q, x.k, x.v, x.g, x.beta, x.a_log, x.bias


def _tensors(inputs: Any) -> Tensors:
    q, k, v, g, beta, a_log, bias = inputs
    return Tensors(q, k, v, g, beta, None, a_log, bias)


def _in_parts(stages: ModuleType) -> bool:
    """Whether a backend walks a part of a call's sequences."""
    return getattr(stages, "SELECTIONS", False)


def _prepare(stages: ModuleType, x: Tensors, call: Call, context: cp.Call) -> Prep | None:
    # A rank without tokens walks nothing; it exchanges all the same.
    if not call.seqs.total:
        return None
    cut = None if _in_parts(stages) else cp.cut_of(context.plan, x.v.shape[2], _segments.RATES)
    seqs = call.seqs if cut is None else cut.segments
    prep: Prep = stages.prep(x.q, x.k, x.g, x.gate(call), x.beta, seqs, scale=call.scale, l2norm=call.l2norm)
    return prep


def _forward(
    x: Tensors, call: Call, context: cp.Call, *, save: bool
) -> tuple[torch.Tensor, Prep | None, cp.Forward]:
    stages = _stages.stages(call.route.backend)
    with running_on(x.v.device):
        prep = _prepare(stages, x, call, context)
        if _in_parts(stages):
            walks = _Walks(stages, call, x, prep)
            return walks.o, prep, cp.forward(context.plan, walks, context.group, save=save)
        joint = _joint_walks(stages, call, x, prep)
        made = cp.forward_jointly(context.plan, joint, context.group, save=save, rates=_segments.RATES)
        return joint.o, prep, made


class _Walks:
    """The stages with a call's tensors: see `cake.core.cp.Walks`."""

    def __init__(
        self,
        stages: ModuleType,
        call: Call,
        x: Tensors,
        prep: Prep | None,
        *,
        do: torch.Tensor | None = None,
    ):
        self.heads, self.device = x.v.shape[2], x.v.device
        self._stages, self._call, self._x, self._prep = stages, call, x, prep
        if do is None:
            self.o = x.v.new_empty(x.v.shape)
        else:
            self._do, self._y = do, x.v.new_empty(x.v.shape)
            self._dbeta = x.v.new_empty(x.v.shape[:3], dtype=FP32)
            self._dq, self._dk, self._dv, self._dg = (
                given.new_empty(given.shape) for given in (x.q, x.k, x.v, x.g)
            )
            self._partials: list[torch.Tensor] = []

    def scan(
        self, seqs: Sequences, entering: torch.Tensor | None, *, final: bool, save: bool, output: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        _, end, states = self._stages.scan(
            self._x.v,
            self._x.beta,
            self._prep,
            seqs,
            initial_state=entering,
            output_final_state=final,
            save_states=save,
            need_output=output,
            o=self.o if output else None,
        )
        return end, states

    def transfer(self, seqs: Sequences) -> tuple[torch.Tensor, torch.Tensor]:
        b, m, _ = self._stages.transfer(self._x.v, self._x.beta, self._prep, seqs)
        return b, m

    def adj(
        self, seqs: Sequences, leaving: torch.Tensor | None, *, need_dh0: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        _, states, dh0 = self._stages.adj(
            self._do, self._x.beta, self._prep, seqs, dht=leaving, need_dh0=need_dh0, y=self._y
        )
        return states, dh0

    def adj_transfer(self, seqs: Sequences) -> torch.Tensor:
        live = torch.ones((seqs.n, self.heads), dtype=torch.int32, device=self.device)
        b: torch.Tensor = self._stages.adj_transfer(self._do, self._x.beta, self._prep, seqs, live)
        return b

    def out(
        self,
        seqs: Sequences,
        states: torch.Tensor,
        adj_states: torch.Tensor,
        *,
        states_edge: bool,
        adj_edge: bool,
    ) -> None:
        x = self._x
        *_, partials = self._stages.out(
            x.q,
            x.k,
            x.v,
            x.g,
            x.gate(self._call),
            self._do,
            self._y,
            x.beta,
            self._prep,
            states,
            adj_states,
            seqs,
            scale=self._call.scale,
            l2norm=self._call.l2norm,
            states_edge=states_edge,
            adj_edge=adj_edge,
            into=(self._dq, self._dk, self._dv, self._dbeta, self._dg),
        )
        if partials is not None:
            self._partials.append(partials)

    def merge(
        self, b: torch.Tensor, m: torch.Tensor, chains: Any, n_out: int, *, transposed: bool
    ) -> torch.Tensor:
        states: torch.Tensor = self._stages.merge(b, m, chains, n_out, transposed=transposed)
        return states

    def input_gradients(self) -> tuple[torch.Tensor | None, ...]:
        """Of q, k, v, g, beta, A_log and the bias."""
        of_tokens = (self._dq, self._dk, self._dv, self._dbeta, self._dg)
        partials = torch.cat(self._partials) if self._partials else None
        return _input_gradients(self._stages, self._x, of_tokens, partials)


def _joint_walks(
    stages: ModuleType, call: Call, x: Tensors, prep: Prep | None, *, do: torch.Tensor | None = None
) -> cp.StageWalks:
    """The stages with a call's tensors, for all sequences at once."""

    def out(y: torch.Tensor, states: Any, adj_states: Any, seqs: Sequences, **edges: bool) -> Any:
        return stages.out(
            x.q,
            x.k,
            x.v,
            x.g,
            x.gate(call),
            do,
            y,
            x.beta,
            prep,
            states,
            adj_states,
            seqs,
            scale=call.scale,
            l2norm=call.l2norm,
            **edges,
        )

    gradients = None
    if do is not None and not call.seqs.total:
        dbeta = x.v.new_empty(x.v.shape[:3], dtype=FP32)
        dq, dk, dv, dg = (given.new_empty(given.shape) for given in (x.q, x.k, x.v, x.g))
        gradients = dq, dk, dv, dbeta, dg, None
    return cp.StageWalks(
        heads=x.v.shape[2],
        device=x.v.device,
        scan_stage=partial(stages.scan, x.v, x.beta, prep),
        transfer_stage=partial(stages.transfer, x.v, x.beta, prep, least=call.least),
        merge_stage=stages.merge,
        adj_stage=partial(stages.adj, do, x.beta, prep),
        adj_transfer_stage=partial(stages.adj_transfer, do, x.beta, prep, least=call.least),
        out_stage=out,
        o=x.v.new_empty(x.v.shape),
        gradients=gradients,
    )


def _input_gradients(
    stages: ModuleType, x: Tensors, of_tokens: Any, partials: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    """Of q, k, v, g, beta, A_log and the bias: of the last two this rank's tokens' share.

    `of_tokens`: dq, dk, dv, dbeta and dg, as of `out`; `partials` of a rank without tokens is None.
    """
    dq, dk, dv, dbeta, dg = of_tokens
    parameters: tuple[torch.Tensor | None, ...] = (None, None)
    if partials is not None:
        sums = stages.reduce(partials)
        parameters = tuple(
            None if given is None else total.to(given.dtype)
            for given, total in zip((x.a_log, x.bias), sums, strict=True)
        )
    elif x.a_log is not None or x.bias is not None:
        parameters = tuple(None if given is None else torch.zeros_like(given) for given in (x.a_log, x.bias))
    return dq, dk, dv, dg, dbeta.to(x.beta.dtype), *parameters
