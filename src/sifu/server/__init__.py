"""A federation that stays up: the worker between rounds, and the server on Flower."""
