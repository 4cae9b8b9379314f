"""A run: from a spec to an engine with its clients, its training as it is recorded, and reading it."""
