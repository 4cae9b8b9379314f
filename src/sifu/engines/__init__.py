"""Engines, which run rounds: the embedded simulator, Flower, and the operator's own programs."""
