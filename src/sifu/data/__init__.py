"""Data of a federation: readers of data sets, partitions, and the samples of each client.

Importing this package loads only numpy; the functions that need torch import it.
"""

from sifu.data.client_data import ClientData, from_arrays, from_dataset, from_torch
from sifu.data.dataset import Dataset, scale_features
from sifu.data.digits import load
from sifu.data.held_out import contents_of, held_out_rows
from sifu.data.npz import dataset_of, read_arrays
from sifu.data.partition import given_clients, partition

__all__ = [
    "ClientData",
    "Dataset",
    "contents_of",
    "dataset_of",
    "from_arrays",
    "from_dataset",
    "from_torch",
    "given_clients",
    "held_out_rows",
    "load",
    "partition",
    "read_arrays",
    "scale_features",
]
