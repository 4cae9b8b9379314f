"""Closed-form heads: models computed from a sum over clients, so that forgetting a client is a subtraction.

A public feature map phi gives k numbers for every sample; a constant 1 is appended. Client i computes, in fixed point,

    Phi^ = rint(2^a phi),   T^ = rint(2^b t),   G_i = Phi^' Phi^,   H_i = Phi^' T^,   n_i,   q_i = sum ||T^||^2

and the head of the remaining clients is W = (G / 2^2a + lambda I)^-1 (H / 2^(a+b)) with G and H their sums
(docs/theory.md, section 14). All quantities before W are integers. After a client is subtracted, the sums therefore
equal, bit for bit, the sums of a federation that never had the client.

`fixed_point` defines a, b, c and k. `targets` computes t from labels. `rows` stores samples instead of sums if that
takes less space. `sums` computes, adds, subtracts and digests (G, H, n, q). `statistics_check` refuses statistics that
no data can have. `sum_check` compares a sum with its parts. `ridge` chooses lambda and solves for W.
"""

from sifu.theory.closed_form.fixed_point import FixedPoint
from sifu.theory.closed_form.ridge import Head, fit_head, penalty, relative_penalty_by_gcv
from sifu.theory.closed_form.rows import Rows
from sifu.theory.closed_form.sums import Statistics, statistics_of, total
from sifu.theory.closed_form.targets import Targets

__all__ = [
    "FixedPoint",
    "Head",
    "Rows",
    "Statistics",
    "Targets",
    "fit_head",
    "penalty",
    "relative_penalty_by_gcv",
    "statistics_of",
    "total",
]
