"""Alignment of a network's units with those of another, by their weights alone: an alternative to the plain mean.

A hidden layer computes the same for any order of its units, so two networks may have learnt the same in different
orders. Weight matching (Ainsworth, Hayase and Srinivasa, 2023, algorithm 1) visits the hidden layers repeatedly. In
each it chooses the permutation that brings the weights into and out of its units closest to the reference's, until none
changes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import linear_sum_assignment

from sifu import InputError
from sifu.core.layout import ModelLayout, Vector
from sifu.theory.arrays import Floats, Integers

MOST_PASSES = 20


@dataclass
class _Layer:
    """Weights (units, previous units, positions) and biases (units,)."""

    weight: Floats
    bias: Floats


def align(model: Vector, reference: Vector, layout: ModelLayout) -> Vector:
    """Return `model` with its hidden units in the order closest to `reference`; its outputs stay the same.

    Layers must form a chain, each with a weight and a bias, as in the paper's networks.
    """
    own, other = _layers(model, layout), _layers(reference, layout)
    for _ in range(MOST_PASSES):
        changed = False
        for number in range(len(own) - 1):
            order = _closest(own[number], own[number + 1], other[number], other[number + 1])
            if (order != np.arange(order.size)).any():
                changed = True
                own[number].weight, own[number].bias = own[number].weight[order], own[number].bias[order]
                own[number + 1].weight = own[number + 1].weight[:, order]
        if not changed:
            break
    flat = np.concatenate([part.reshape(-1) for layer in own for part in (layer.weight, layer.bias)])
    return flat.astype(model.dtype)


def _closest(into: _Layer, out_of: _Layer, into_other: _Layer, out_of_other: _Layer) -> Integers:
    """Return the order of units with the largest inner product of the weights into and out of them."""
    likeness = into_other.weight.reshape(into.bias.size, -1) @ into.weight.reshape(into.bias.size, -1).T
    likeness += np.outer(into_other.bias, into.bias)
    likeness += np.einsum("oip,ojp->ij", out_of_other.weight, out_of.weight, optimize=True)
    order: Integers = linear_sum_assignment(likeness, maximize=True)[1]
    return order


def _layers(model: Vector, layout: ModelLayout) -> list[_Layer]:
    """Split a flat vector into layers; a linear layer after a convolution sees channels times positions."""
    layers: list[_Layer] = []
    at = 0
    shapes = list(zip(layout.names, layout.shapes, strict=True))
    for (name, shape), (bias_name, bias_shape) in zip(shapes[::2], shapes[1::2], strict=True):
        before = layers[-1].bias.size if layers else shape[1]
        size, inputs = int(np.prod(shape)), int(np.prod(shape[1:]))
        if bias_name != name.replace("weight", "bias") or bias_shape != (shape[0],) or inputs % before:
            raise InputError(
                f"units can be aligned only in a chain of layers with weight and bias, found {name} of "
                f"shape {shape} after {before} units"
            )
        weight = model[at : at + size].astype(np.float64).reshape(shape[0], before, -1)
        layers.append(_Layer(weight, model[at + size : at + size + shape[0]].astype(np.float64)))
        at += size + shape[0]
    return layers
