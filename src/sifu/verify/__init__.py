"""Verification of runs and certificates: recomputes every claim."""
