"""Servers of long-running federations: on Flower, or as a loop for other frameworks."""
