"""Backbones of Hugging Face's `transformers` for images and texts, from a folder or from the hub.

Weights are read from safetensors files only, and code shipped with a model is never run. The digest of the map covers
every file that determines its features: configuration, weights, tokenizer and preprocessing.

`tokenised` turns a text into a row of token ids, padded with -1. An activation is the mean over the tokens of a text,
or over the positions of an image.
"""

from __future__ import annotations

import abc
import functools
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from sifu.data.feature_maps.deep_network import blocks_of, deep_network, pooled
from sifu.data.feature_maps.fixed_networks import NetworkFeatures
from sifu.errors import InputError, UnusableSamplesError, install_extra

FILES = ("*.json", "*.safetensors", "*.txt", "*.model")
"""Patterns of the files of a model that are read; all other files, including programs, are ignored."""
USUAL_TOKENS = 128
END = -1
"""Padding after the last token of a text."""
SAME_FACTOR = 1e-3
"""Largest difference from 1 at which a pixel factor counts as 1: configurations round 1 / 255 to a few digits."""
RESIZING = {2: "bilinear", 3: "bicubic"}
"""Interpolation modes, by their number in the preprocessing configuration."""


class PublicNetwork(nn.Module, abc.ABC):
    """A public network that exposes the means of its layers."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    @abc.abstractmethod
    def activations(self, x: Tensor) -> list[Tensor]:
        """Return the means after the embedding and after every layer."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the means of the last layer."""
        return self.activations(x)[-1]

    def _states(self, **inputs: Tensor) -> Sequence[Tensor]:
        states: Sequence[Tensor] | None = self.network(**inputs, output_hidden_states=True).hidden_states
        if not states:
            raise InputError(f"{type(self.network).__name__} exposes no hidden states: choose another features.model")
        return states


class TextNetwork(PublicNetwork):
    """Network that maps rows of token ids to means over the tokens of each text."""

    def activations(self, x: Tensor) -> list[Tensor]:
        """Return the means over tokens after the embedding and after every layer."""
        ids, known = x.long(), getattr(self.network.config, "vocab_size", None) or torch.iinfo(torch.int64).max
        if not torch.equal(ids.to(x.dtype), x) or int(ids.min()) < END or int(ids.max()) >= known:
            raise UnusableSamplesError(
                f"token ids must be whole numbers from 0 to {known - 1}, and {END} after the end of a text, found "
                f"{x.min():g} to {x.max():g}: use the tokenizer that the model was trained with"
            )
        is_token = ids != END
        is_token[:, 0] = True  # an empty text counts as one token
        states = self._states(input_ids=ids.clamp(min=0), attention_mask=is_token.long())
        if any(state.shape[1] != ids.shape[1] for state in states):
            raise InputError(
                f"{type(self.network).__name__} merges tokens ({ids.shape[1]} tokens, layers of "
                f"{[state.shape[1] for state in states]} positions): choose another features.model"
            )
        weights = is_token.unsqueeze(-1).to(states[-1].dtype)
        return [(state * weights).sum(dim=1) / weights.sum(dim=1) for state in states]


class ImageNetwork(PublicNetwork):
    """Network that preprocesses images with values from 0 to 1 and maps them to means over positions."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, network: nn.Module, side: int, prepared: dict[str, Any]) -> None:
        super().__init__(network)
        self.side, self.mode = side, RESIZING.get(prepared.get("resample", 2), "bilinear")
        self.channels = getattr(network.config, "num_channels", 3)
        rescaled = prepared.get("do_rescale", True)
        self.factor = 255.0 * prepared.get("rescale_factor", 1.0 / 255.0) if rescaled else 255.0
        self.flips = bool(prepared.get("do_flip_channel_order", False))
        centred = prepared.get("do_normalize", True)
        for name, key, neutral in (("mean", "image_mean", 0.0), ("deviation", "image_std", 1.0)):
            numbers = prepared.get(key) if centred else None
            values = torch.tensor(numbers if numbers else [neutral] * self.channels, dtype=torch.float32)
            self.register_buffer(name, values.reshape(1, -1, 1, 1))

    def settings(self) -> dict[str, Any]:
        """Return the side that images are resized to, and unusual options of the preprocessing."""
        chosen: dict[str, Any] = {"size": self.side}
        if abs(self.factor - 1.0) > SAME_FACTOR:
            chosen["factor"] = self.factor
        return chosen | ({"flips": True} if self.flips else {})

    def activations(self, x: Tensor) -> list[Tensor]:
        """Return the means over positions after the embedding and after every layer."""
        if x.shape[1] == 1:
            x = x.expand(-1, self.channels, -1, -1)
        if x.shape[1] != self.channels:
            raise InputError(
                f"images have {x.shape[1]} channels, and {type(self.network).__name__} takes {self.channels}: convert "
                "the images (an alpha channel must be removed), or choose another features.model"
            )
        if tuple(x.shape[2:]) != (self.side, self.side):
            shrinks = min(x.shape[2:]) > self.side
            x = F.interpolate(x, (self.side, self.side), mode=self.mode, align_corners=False, antialias=shrinks)
        if abs(self.factor - 1.0) > SAME_FACTOR:
            x = x * self.factor
        if self.flips:
            x = x.flip(1)
        states = self._states(pixel_values=(x - self.mean.to(x.dtype)) / self.deviation.to(x.dtype))
        return [pooled(state) for state in states]


def transformer_features(
    shape: tuple[int, ...],
    *,
    model: str,
    layers: int | str = "deep",
    size: int = 0,
    count: int = 0,
    seed: int = 0,
    norm: float = 10.0,
) -> NetworkFeatures:
    """Return the feature map of a public model, for images or for texts as rows of token ids.

    The options are keys of `[features]`; `shape` is (channels, height, width) of images, or (tokens,) of texts.
    """
    folder = model_folder(model)
    network, drawn = _loaded(folder)
    of_images = len(shape) == 3
    backbone: PublicNetwork
    if of_images:
        prepared = _preprocessing(folder)
        backbone = ImageNetwork(getattr(network, "vision_model", network), size or _side(folder, prepared), prepared)
    else:
        backbone = TextNetwork(getattr(network, "text_model", network))
    _refuse_drawn(backbone, drawn, folder)
    blocks = layers if isinstance(layers, int) else 0
    try:
        if layers == "deep":
            blocks = blocks_of(backbone, shape)
        read = deep_network(backbone, shape, blocks, mirror=of_images, count=count, seed=seed)
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        positions = getattr(backbone.network.config, "max_position_embeddings", 0)
        known = f", which has {positions} positions" if positions and not of_images else ""
        raise InputError(
            f"the model in {folder}{known} cannot process {'images' if of_images else 'texts'} of shape {shape} "
            f"({type(error).__name__}: {(str(error).splitlines() or ['no reason given'])[0][:200]}): "
            f"set features.size to another number of {'pixels' if of_images else 'tokens'}, or choose another model"
        ) from error
    return NetworkFeatures(read, shape, norm=norm, kind="transformers", source=files_digest(folder))


def tokenised(model: str, texts: Sequence[str], size: int = 0) -> NDArray[np.int32]:
    """Return texts as rows of `size` token ids; long texts are cut, and short texts are padded with -1.

    If `size` is 0, a row has 128 token ids, or as many as the model has positions if these are fewer.
    """
    strange = [text for text in texts if not isinstance(text, str)]
    if strange:
        raise InputError(f"a text was expected, found {strange[0]!r}")
    folder = model_folder(model)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    wanted = size or min(USUAL_TOKENS, config.get("max_position_embeddings") or USUAL_TOKENS)
    rows = np.full((len(texts), wanted), END, dtype=np.int32)
    tokenizer = _tokenizer(str(folder), files_digest(folder))
    if not len(texts):
        return rows
    for row, ids in zip(rows, tokenizer(list(texts), truncation=True, max_length=wanted)["input_ids"], strict=True):
        row[: len(ids)] = ids
    known = config.get("vocab_size")
    if known and rows.max() >= known:
        raise InputError(
            f"the tokenizer in {model} produced token {rows.max()}, and the model knows {known} tokens: use the "
            "tokenizer the model was trained with"
        )
    return rows


def model_folder(name: str) -> Path:
    """Return the folder of a model: a local folder, or the download of a model on the hub.

    Raises:
        InputError: If the model is not a local folder and cannot be downloaded, lacks its configuration or weights, or
            refers to weights elsewhere.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        folder = _from_hub(name)
    if not any(folder.glob("*.safetensors")) or not (folder / "config.json").is_file():
        raise InputError(f"{folder} is not a model folder: it needs config.json and weights in *.safetensors files")
    if (folder / "adapter_config.json").exists():
        raise InputError(
            f"{folder} has an adapter (adapter_config.json), whose base model is elsewhere and may change unnoticed: "
            "merge the adapter into the model, and save that"
        )
    for index in folder.glob("*.index.json"):
        _check_index(index)
    return folder


def _check_index(index: Path) -> None:
    """Refuse a list of weight files with a file outside its folder: the digest of the map would not cover this file."""
    try:
        listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        outside = next((name for name in listed if Path(name).name != name), None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{index} is not a list of weight files: {type(error).__name__}: {error}") from error
    if outside is not None:
        raise InputError(f"{index} names the weight file {outside!r}: all files of a model must be in its folder")


@functools.cache
def _from_hub(name: str) -> Path:
    _library()
    from huggingface_hub import snapshot_download

    for offline in (True, False):
        try:
            return Path(snapshot_download(name, allow_patterns=list(FILES), local_files_only=offline))
        except Exception as error:  # the library raises many types: unknown name, no connection, full disk
            cause = error
    raise InputError(
        f"the model {name!r} is not a folder and cannot be downloaded ({type(cause).__name__}): on a machine with a "
        f"connection, run hf download {name} --local-dir FOLDER, and set features.model to that folder"
    ) from cause


def files_digest(folder: Path) -> str:
    """Return the digest of all files read from a model; a process hashes each file again only if it changed."""
    hashed = hashlib.sha256()
    for path in sorted({path for pattern in FILES for path in folder.glob(pattern)}):
        found = path.stat()
        digest = _file_digest(str(path), found.st_size, found.st_mtime_ns, found.st_ino)
        hashed.update(f"{path.name} {digest}\n".encode())
    return hashed.hexdigest()


@functools.cache
def _file_digest(path: str, size: int, changed: int, inode: int) -> str:
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _library() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise InputError(
            f'features.kind = "transformers" needs the library transformers: {install_extra("transformers")}'
        ) from error
    return transformers


def _loaded(folder: Path) -> tuple[nn.Module, list[Tensor]]:
    """Return the model in a folder, without unused pooling layers, and the weights that its files lack.

    The library draws missing weights at random.
    """
    library, here = _library(), {"local_files_only": True, "trust_remote_code": False}
    bars = library.utils.logging
    shown, verbosity = bars.is_progress_bar_enabled(), bars.get_verbosity()
    bars.disable_progress_bar()
    bars.set_verbosity_error()  # hide warnings about missing weights: `_refuse_drawn` checks them
    try:
        network, report = library.AutoModel.from_pretrained(
            folder, use_safetensors=True, dtype=torch.float32, output_loading_info=True, **here
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise InputError(f"the model in {folder} cannot be loaded: {str(error).splitlines()[0][:300]}") from error
    finally:
        bars.set_verbosity(verbosity)
        if shown:
            bars.enable_progress_bar()
    drawn = [value for name, value in _values(network) if name in report["missing_keys"]]
    if getattr(network.config, "is_encoder_decoder", False) or {"encoder", "decoder"} <= set(network._modules):
        network = network.get_encoder()
    pooler = getattr(network, "pooler", None)
    if isinstance(pooler, nn.Module) and any(True for _ in pooler.parameters()):
        network.pooler = nn.Identity()
    return network.eval(), drawn


def _values(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters, and the buffers of a floating-point type, such as running means."""
    yield from network.named_parameters()
    yield from ((name, buffer) for name, buffer in network.named_buffers() if buffer.is_floating_point())


def _refuse_drawn(network: nn.Module, drawn: list[Tensor], folder: Path) -> None:
    """Refuse a network with random weights: they differ each time, and the digest of its files does not cover them."""
    random = {id(weight) for weight in drawn}
    names = [name.removeprefix("network.") for name, value in _values(network) if id(value) in random]
    if names:
        raise InputError(
            f"the files in {folder} lack {len(names)} of the model's weights ({names[0]}): download it again, or "
            "choose another features.model"
        )


@functools.lru_cache(maxsize=4)
def _tokenizer(folder: str, digest: str) -> Any:
    """Return the tokenizer of a folder whose files have this `digest`."""
    if not any(True for pattern in ("tokenizer*", "vocab*", "*.model") for _ in Path(folder).glob(pattern)):
        raise InputError(f"{folder} has no tokenizer: add tokenizer.json, or choose a model for texts")
    try:
        loaded = _library().AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise InputError(f"{folder} has no tokenizer: {str(error).splitlines()[0][:300]}") from error
    if getattr(getattr(getattr(loaded, "backend_tokenizer", None), "model", None), "dropout", None):
        raise InputError(
            f"the tokenizer in {folder} splits words at random (dropout), so a text has other tokens each time: set "
            "dropout to null in tokenizer.json"
        )
    return loaded


def _preprocessing(folder: Path) -> dict[str, Any]:
    """Return the configuration of the model's image preprocessing."""
    try:
        prepared = json.loads((folder / "preprocessor_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"{folder} has no readable preprocessor_config.json, which describes the preprocessing of images: choose a "
            "model for images"
        ) from error
    if not isinstance(prepared, dict):
        raise InputError(f"{folder / 'preprocessor_config.json'} is not a JSON object")
    if prepared.get("rescale_offset") or not isinstance(prepared.get("rescale_factor", 1.0), int | float):
        raise InputError(
            f"{folder / 'preprocessor_config.json'} asks for a shift of the pixels (rescale_offset), or its "
            "rescale_factor is not a number: choose another features.model"
        )
    return prepared


def _side(folder: Path, prepared: dict[str, Any]) -> int:
    for key in ("crop_size", "size"):
        size = prepared.get(key)
        side = size.get("height") or size.get("shortest_edge") if isinstance(size, dict) else size
        if isinstance(side, int) and side > 0:
            return side
    raise InputError(f"{folder / 'preprocessor_config.json'} names no size: set features.size")
