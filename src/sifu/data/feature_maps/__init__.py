"""Public feature maps, which compute the inputs of closed-form heads and of linear models trained in rounds.

The module `feature_map` defines maps, and when a map is exact. Importing this package does not import torch.
"""

from sifu.data.feature_maps.build import fixed_point, specified_map
from sifu.data.feature_maps.feature_map import CachedFeatures, FeatureMap
from sifu.data.feature_maps.row_maps import PlainInputs, RandomFourier

__all__ = [
    "CachedFeatures",
    "FeatureMap",
    "PlainInputs",
    "RandomFourier",
    "fixed_point",
    "specified_map",
]
