"""Public feature maps, the inputs of closed-form heads and of softmax heads trained under SIFU.

The module `feature_map` defines a map and its exactness. Importing this package does not import torch.
"""

from sifu.data.feature_maps.build import KINDS, feature_map, fixed_point
from sifu.data.feature_maps.convolutions import RandomConvolutions
from sifu.data.feature_maps.feature_map import CachedFeatures, FeatureMap, PlainInputs, Projection, RandomFourier

__all__ = [
    "KINDS",
    "CachedFeatures",
    "FeatureMap",
    "PlainInputs",
    "Projection",
    "RandomConvolutions",
    "RandomFourier",
    "feature_map",
    "fixed_point",
]
