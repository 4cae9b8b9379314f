"""A long-running federation: the worker between rounds, and the server on Flower."""
