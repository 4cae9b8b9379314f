"""Client for built-in models, used by apps on Flower nodes."""

from sifu.engines.ready import ReadyClient

__all__ = ["ReadyClient"]
