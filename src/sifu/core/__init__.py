"""The contracts of the package: spec, request terms, engine, certificate, premises, ledger."""
