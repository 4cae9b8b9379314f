"""Shared contracts of the package: spec, request terms, engine, premises, ledger and wording."""
