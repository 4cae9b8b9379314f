"""Engines run rounds: the embedded simulator, and Flower."""
