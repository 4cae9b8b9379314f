"""Engines, which run rounds: the embedded simulator, Flower, and programs of the operator's own."""
