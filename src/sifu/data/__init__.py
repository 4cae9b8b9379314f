"""Data of a federation: readers of public data sets, ways to split them, and one record for each client.

Importing this package loads only numpy: Pillow, scikit-learn, torch and the network are reached
only by the functions that need them.
"""

from sifu.data.client_data import ClientData, from_arrays, from_dataset, from_torch, frozen_features
from sifu.data.dataset import Dataset, Scale, scale_features
from sifu.data.partition import KINDS, given_names, partition, watermarked
from sifu.data.sources import NAMES, load

__all__ = [
    "KINDS",
    "NAMES",
    "ClientData",
    "Dataset",
    "Scale",
    "from_arrays",
    "from_dataset",
    "from_torch",
    "frozen_features",
    "given_names",
    "load",
    "partition",
    "scale_features",
    "watermarked",
]
