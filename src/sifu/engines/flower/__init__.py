"""Federations on Flower: an engine over its `Grid`, and functions that turn a node into a tracked client.

This package is imported only if a federation runs on Flower (the extra `flower`).
"""
