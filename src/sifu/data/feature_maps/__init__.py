"""Public feature maps: what a closed-form head, or a softmax head under SIFU, is put on.

`feature_map` says what a map is and when it is exact. Importing this package does not import torch.
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
