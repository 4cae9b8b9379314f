"""Client of the built-in models, for apps on Flower's nodes."""

from sifu.engines.ready import ReadyClient

__all__ = ["ReadyClient"]
