"""Packed numbers of statistics files (docs/store.md, section 5a)."""

from __future__ import annotations

import numpy as np

RUN = 64


def unpacked(content: bytes, size: int) -> np.ndarray | None:
    """Return the numbers in packed content, each of `size` bytes, or None if the content is malformed."""
    if len(content) < 8:
        return None
    count, half = int.from_bytes(content[:8], "little"), size // 2
    runs = (count + RUN - 1) // RUN
    widths_at = 8 + runs * RUN * half
    place = widths_at + runs
    widths = content[widths_at:place]
    allowed = {0, 1, 2, half}
    if len(widths) != runs or not set(widths) <= allowed or len(content) != place + RUN * sum(widths):
        return None
    numbers = np.frombuffer(content[8:widths_at], f"<u{half}").astype(f"<i{size}").reshape(runs, RUN)
    scale = 2 ** (8 * half)
    for width in sorted(allowed - {0}):
        chosen = [run for run, of_run in enumerate(widths) if of_run == width]
        end = place + len(chosen) * RUN * width
        numbers[chosen] += np.frombuffer(content[place:end], f"<i{width}").reshape(-1, RUN) * np.array(
            scale, f"<i{size}"
        )
        place = end
    return numbers.reshape(-1)[:count]


def numbers_of(data: bytes, start: bytes, size: int) -> np.ndarray | None:
    """Return the numbers of a file that begins with the line `start`, or None if it does not.

    The last 32 bytes are the salt.
    """
    return unpacked(data[len(start) : -32], size) if data.startswith(start) else None
