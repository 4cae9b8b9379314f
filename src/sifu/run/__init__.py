"""Runs: an engine and clients from a spec, recorded training, and views of the record."""
