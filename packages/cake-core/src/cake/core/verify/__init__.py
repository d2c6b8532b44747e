"""Proof on the user's own machine: what ``cake verify`` does, and what an op gives it to do it with.

An op's ``OpSpec.verify`` names a ``Verify``: its cases, how to call the op on them, and the truth. Each case
is judged against the truth, tensor by tensor, sequence by sequence and block by block; then the bits of
several calls that must agree are compared.
"""

from cake.core.verify._model import Case, Given, Verify
from cake.core.verify._report import document, header, table
from cake.core.verify._runner import Outcome, Runner

__all__ = ["Case", "Given", "Outcome", "Runner", "Verify", "document", "header", "table"]
