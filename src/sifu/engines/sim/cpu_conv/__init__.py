"""Convolutional networks on the CPU: passes written out by hand."""
