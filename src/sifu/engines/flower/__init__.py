"""Federations on Flower: an engine over its `Grid`, and what turns a node into a tracked client.

Nothing here is imported unless a federation runs on Flower (the extra `flower`).
"""
