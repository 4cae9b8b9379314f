"""From a spec to an engine with its clients."""
