"""A call under a context as a node of autograd: the op's stages, walked as `cake.core.cp` says.

With `recompute_state` off the forward saves what the single-rank one does, a tape for each role; with it on,
its inputs. Either way it saves the states that entered from other ranks and the maps that the backward
merges with: the backward makes one exchange of its own and repeats none.
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
from cake.gdn import _route, _stages
from cake.gdn._autograd import Call
from cake.gdn._stages import Prep

FP32 = torch.float32
_PREP = Prep._fields
# What a walk leaves: of each role, or of all sequences at once.
_TAPES = (*cp.ROLES, "all", "m", "live")


# No tracer sees an exchange.
@cp.untraced
def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    call: Call,
    context: cp.Call,
) -> torch.Tensor:
    """The output, on the graph if a backward can follow."""
    refuse_tangents(("q", "k", "v", "g", "beta"), (q, k, v, g, beta))  # the exchange carries none
    if call.seqs.total:
        _route.note(call.route)
    if not call.differentiable:
        return _forward(q, k, v, g, beta, call, context, save=False)[0]
    apply: Any = _UnderContext.apply
    o: torch.Tensor = apply(q, k, v, g, beta, call, context)
    return o


class _UnderContext(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        call: Call,
        context: cp.Call,
    ) -> torch.Tensor:
        recompute = call.route.recompute_state
        o, prep, made = _forward(q, k, v, g, beta, call, context, save=not recompute)
        saved = {"q": q, "k": k, "v": v, "beta": beta, "maps": made.maps, **made.tapes}
        # Only walking again needs their values.
        saved["entering"] = made.entering if recompute else None
        if recompute or prep is None:
            saved["g"] = g
        else:
            saved |= {name: getattr(prep, name) for name in _PREP}
        ctx.call, ctx.context, ctx.g_dtype = call, context, g.dtype
        ctx.made = dict(zip(saved, saved_as(saved.values()), strict=True))
        ctx.save_for_backward(*saved.values())
        return o

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, do: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: Call = ctx.call
        context: cp.Call = ctx.context
        saved: dict[str, Any] = dict(zip(ctx.made, ctx.saved_tensors, strict=True))
        for name, made in ctx.made.items():
            if made is not None:
                check_saved(name, saved[name], *made)
        q, k, v, beta = (saved[name] for name in ("q", "k", "v", "beta"))
        stages = _stages.stages(call.route.backend)
        with running_on(v.device):
            prep = None
            if "t" in saved:
                prep = Prep(*(saved[name] for name in _PREP))
            elif call.seqs.total:
                prep = _prepare(stages, k, saved["g"], beta, call, context)
            made = cp.Forward(
                tapes={name: saved[name] for name in _TAPES if name in saved},
                entering=saved["entering"],
                maps=saved["maps"],
            )
            if _in_parts(stages):
                walks = _Walks(stages, call, q, k, v, beta, prep, do=loadable(do))
                cp.backward(context.plan, walks, context.group, made)
                dq, dk, dv, dbeta, dg = walks.gradients
            else:
                joint = _joint_walks(stages, call, q, k, v, beta, prep, do=loadable(do))
                cp.backward_jointly(context.plan, joint, context.group, made)
                dq, dk, dv, dbeta, dg = joint.gradients
        grads = (dq, dk, dv, dg.to(ctx.g_dtype), dbeta.to(beta.dtype))
        wanted = ctx.needs_input_grad
        return (*(x if need else None for x, need in zip(grads, wanted, strict=False)), None, None)


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    call: Call,
    context: cp.Call,
    *,
    save: bool,
) -> tuple[torch.Tensor, Prep | None, cp.Forward]:
    stages = _stages.stages(call.route.backend)
    with running_on(v.device):
        # A rank without tokens walks nothing; it exchanges all the same.
        prep = _prepare(stages, k, g, beta, call, context) if call.seqs.total else None
        if _in_parts(stages):
            walks = _Walks(stages, call, q, k, v, beta, prep)
            return walks.o, prep, cp.forward(context.plan, walks, context.group, save=save)
        joint = _joint_walks(stages, call, q, k, v, beta, prep)
        made = cp.forward_jointly(context.plan, joint, context.group, save=save)
        return joint.o, prep, made


def _in_parts(stages: ModuleType) -> bool:
    """Whether a backend walks a part of a call's sequences."""
    return getattr(stages, "SELECTIONS", False)


def _prepare(
    stages: ModuleType,
    k: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    call: Call,
    context: cp.Call,
) -> Prep:
    cut = None if _in_parts(stages) else cp.cut_of(context.plan, beta.shape[2])
    seqs = call.seqs if cut is None else cut.segments
    prep: Prep = stages.prep(k, g, beta, seqs, l2norm=call.l2norm)
    return prep


class _Walks:
    """The stages with a call's tensors: see `cake.core.cp.Walks`."""

    def __init__(
        self,
        stages: ModuleType,
        call: Call,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        beta: torch.Tensor,
        prep: Prep | None,
        *,
        do: torch.Tensor | None = None,
    ):
        self.heads, self.device = v.shape[2], v.device
        self._stages, self._call, self._prep = stages, call, prep
        self._q, self._k, self._v, self._beta = q, k, v, beta
        if do is None:
            self.o = v.new_empty(v.shape)
        else:
            self._do, self._y = do, v.new_empty(v.shape)
            self.gradients = (
                *(x.new_empty(x.shape) for x in (q, k, v)),
                *(v.new_empty(v.shape[:3], dtype=FP32) for _ in range(2)),
            )

    def scan(
        self, seqs: Sequences, entering: torch.Tensor | None, *, final: bool, save: bool, output: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        _, end, states = self._stages.scan(
            self._q,
            self._k,
            self._v,
            self._beta,
            self._prep,
            seqs,
            scale=self._call.scale,
            l2norm=self._call.l2norm,
            initial_state=entering,
            output_final_state=final,
            save_states=save,
            need_output=output,
            o=self.o if output else None,
        )
        return end, states

    def transfer(self, seqs: Sequences) -> tuple[torch.Tensor, torch.Tensor]:
        b, m, _ = self._stages.transfer(self._k, self._v, self._beta, self._prep, seqs)
        return b, m

    def adj(
        self, seqs: Sequences, leaving: torch.Tensor | None, *, need_dh0: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        _, states, dh0, self._rq = self._stages.adj(
            self._q,
            self._k,
            self._do,
            self._beta,
            self._prep,
            seqs,
            scale=self._call.scale,
            l2norm=self._call.l2norm,
            dht=leaving,
            need_dh0=need_dh0,
            y=self._y,
        )
        return states, dh0

    def adj_transfer(self, seqs: Sequences) -> torch.Tensor:
        live = torch.ones((seqs.n, self.heads), dtype=torch.int32, device=self.device)
        b: torch.Tensor = self._stages.adj_transfer(
            self._q,
            self._k,
            self._do,
            self._beta,
            self._prep,
            seqs,
            live,
            scale=self._call.scale,
            l2norm=self._call.l2norm,
        )
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
        self._stages.out(
            self._q,
            self._k,
            self._v,
            self._do,
            self._y,
            self._beta,
            self._prep,
            states,
            adj_states,
            self._rq,
            seqs,
            scale=self._call.scale,
            l2norm=self._call.l2norm,
            states_edge=states_edge,
            adj_edge=adj_edge,
            into=self.gradients,
        )

    def merge(
        self, b: torch.Tensor, m: torch.Tensor, chains: Any, n_out: int, *, transposed: bool
    ) -> torch.Tensor:
        states: torch.Tensor = self._stages.merge(b, m, chains, n_out, transposed=transposed)
        return states


def _joint_walks(
    stages: ModuleType,
    call: Call,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    prep: Prep | None,
    *,
    do: torch.Tensor | None = None,
) -> cp.StageWalks:
    """The stages with a call's tensors, for all sequences at once."""

    def adj(seqs: Sequences, **given: Any) -> tuple[Any, ...]:
        y, adj_states, dh0, rq = stages.adj(
            q, k, do, beta, prep, seqs, scale=call.scale, l2norm=call.l2norm, **given
        )
        return y, (adj_states, rq), dh0

    def out(
        y: torch.Tensor, states: Any, adjoints: Any, seqs: Sequences, **edges: bool
    ) -> tuple[torch.Tensor, ...]:
        gradients: tuple[torch.Tensor, ...] = stages.out(
            q,
            k,
            v,
            do,
            y,
            beta,
            prep,
            states,
            *adjoints,
            seqs,
            scale=call.scale,
            l2norm=call.l2norm,
            **edges,
        )
        return gradients

    gradients = None
    if do is not None and not call.seqs.total:
        dbeta = v.new_empty(v.shape[:3], dtype=FP32)
        gradients = (*(x.new_empty(x.shape) for x in (q, k, v)), dbeta, dbeta)
    return cp.StageWalks(
        heads=v.shape[2],
        device=v.device,
        scan_stage=partial(stages.scan, q, k, v, beta, prep, scale=call.scale, l2norm=call.l2norm),
        transfer_stage=partial(stages.transfer, k, v, beta, prep, least=call.least),
        merge_stage=stages.merge,
        adj_stage=adj,
        adj_transfer_stage=partial(
            stages.adj_transfer,
            q,
            k,
            do,
            beta,
            prep,
            scale=call.scale,
            l2norm=call.l2norm,
            least=call.least,
        ),
        out_stage=out,
        o=v.new_empty(v.shape),
        gradients=gradients,
    )
