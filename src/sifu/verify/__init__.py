"""Verification of runs and certificates, which recomputes every claim."""
