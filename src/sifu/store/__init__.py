"""A run on disk: one SQLite database, models as safetensors, events in a hash chain (docs/store.md)."""
