"""Verification of runs and certificates."""
