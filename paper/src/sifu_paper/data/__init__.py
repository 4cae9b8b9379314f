"""Public data sets, which sifu finds through the entry point group `sifu.data`."""
