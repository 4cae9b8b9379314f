"""Hugging Face models as backbones for images and texts, built here from a configuration."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from texts.small_model import SIZES, save_text_model

import sifu
import sifu_verifier
from sifu.api import verify_run
from sifu.core.spec.sections import FeaturesSpec
from sifu.data.feature_maps.build import specified_map, texts_as_tokens
from sifu.data.feature_maps.fixed_networks import NetworkFeatures
from sifu.errors import InputError, RoundRejectedError, UnusableSamplesError
from sifu.store.reader import RunReader

transformers = pytest.importorskip("transformers")

from sifu.data.feature_maps import transformer_networks  # noqa: E402
from sifu.data.feature_maps.transformer_networks import tokenised  # noqa: E402

USUAL_KEYS = {"do_rescale": True, "rescale_factor": 0.00392156862745098}
WORDS = ("good", "bad", "fine", "poor", "film", "book", "very", "not", "a", "the")


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_model(tmp_path_factory.mktemp("text-model"), WORDS)


@pytest.fixture(scope="module")
def image_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("image-model")
    torch.manual_seed(1)
    transformers.ViTModel(transformers.ViTConfig(image_size=16, patch_size=8, **SIZES)).save_pretrained(folder)
    prepared = {"size": {"height": 16, "width": 16}, "image_mean": [0.5] * 3, "image_std": [0.25] * 3, "resample": 2}
    (folder / "preprocessor_config.json").write_text(json.dumps(prepared))
    return folder


TEXTS = ["good film", "not a good book", "very very bad", "", "an unknown word", "the film " * 20]


def test_deep_features_of_a_text_are_the_means_over_its_tokens(text_model: Path) -> None:
    """Each text goes separately, without padding, through the library's own tokenizer and model."""
    features = specified_map(FeaturesSpec(kind="transformers", model=str(text_model), size=8), (8,))
    assert features.features == 3 * 16
    rows = features(tokenised(str(text_model), TEXTS, 8))
    model = transformers.AutoModel.from_pretrained(text_model).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(text_model)
    for text, row in zip(TEXTS, rows, strict=True):
        inputs = tokenizer(text, truncation=True, max_length=8, return_tensors="pt")
        with torch.no_grad():
            states = model(**inputs, output_hidden_states=True).hidden_states
        parts = [state[0].mean(dim=0).double().numpy() for state in states]
        expected = np.concatenate([part / np.linalg.norm(part) for part in parts])
        np.testing.assert_allclose(row, 10.0 * expected / np.linalg.norm(expected), atol=1e-4)


def test_loading_a_model_prints_nothing(text_model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    bars = transformers.utils.logging
    assert bars.is_progress_bar_enabled()
    specified_map(FeaturesSpec(kind="transformers", model=str(text_model), size=8), (8,))
    assert capfd.readouterr() == ("", "")
    assert bars.is_progress_bar_enabled()  # other users of the library keep their progress bars
    transformers.AutoModel.from_pretrained(text_model)
    assert "Loading weights" in capfd.readouterr().err


def test_token_ids_end_with_the_text(text_model: Path) -> None:
    assert tokenised(str(text_model), ["good film"], 6).tolist() == [[2, 4, 8, 3, -1, -1]]
    assert tokenised(str(text_model), ["good film"]).shape == (1, 16)  # all positions of the model
    wide = save_text_model(text_model.parent / "wide", WORDS, tokens=200)
    assert tokenised(str(wide), ["good film"]).shape == (1, 128)
    with pytest.raises(InputError, match="a text was expected, found 3"):
        tokenised(str(text_model), [3])  # type: ignore[list-item]


def averaged(states: list[torch.Tensor]) -> np.ndarray:
    """Return the features of images, from the last layer's states of the images and of their mirror images."""
    means = [state.mean(dim=1).double().numpy() for state in states]
    rows = sum(mean / np.linalg.norm(mean, axis=1, keepdims=True) for mean in means)
    return 10.0 * rows / np.linalg.norm(rows, axis=1, keepdims=True)


def test_images_are_prepared_as_the_model_says(image_model: Path) -> None:
    x = np.random.default_rng(0).random((3, 3, 16, 16))
    chosen = FeaturesSpec(kind="transformers", model=str(image_model), layers="last")
    model = transformers.AutoModel.from_pretrained(image_model).eval()
    with torch.no_grad():
        prepared = (torch.tensor(x, dtype=torch.float32) - 0.5) / 0.25
        both = [model(each, output_hidden_states=True).hidden_states[-1] for each in (prepared, prepared.flip(-1))]
    expected = averaged(both)
    np.testing.assert_allclose(specified_map(chosen, (3, 16, 16))(x), expected, atol=1e-4)
    deep = specified_map(FeaturesSpec(kind="transformers", model=str(image_model)), (3, 16, 16))
    assert deep.features == 3 * 16
    np.testing.assert_allclose(deep(x), deep(x[..., ::-1].copy()), atol=1e-4)
    assert specified_map(chosen, (1, 8, 8))(x[:, :1, :8, :8]).shape == (3, 16)  # grey and smaller images


@pytest.mark.parametrize(
    "keys",
    [
        {},
        USUAL_KEYS,
        {"rescale_factor": 1.0 / 127.5},
        {"do_rescale": False},
        {"do_flip_channel_order": True},
        {"do_flip_channel_order": True, "do_normalize": False, "rescale_factor": 0.5 / 255.0},
    ],
)
def test_pixels_are_those_of_the_librarys_own_processor(
    keys: dict[str, Any], image_model: Path, tmp_path: Path
) -> None:
    """The reference applies each step of the configuration to bytes, as the library documents it."""
    folder = Path(shutil.copytree(image_model, tmp_path / "model"))
    said = json.loads((folder / "preprocessor_config.json").read_text()) | keys
    (folder / "preprocessor_config.json").write_text(json.dumps(said))
    chosen = FeaturesSpec(kind="transformers", model=str(folder), layers="last")
    images = np.random.default_rng(0).integers(0, 256, (3, 3, 16, 16)).astype(np.uint8)
    pixels = images.astype(np.float64)
    if said.get("do_rescale", True):
        pixels = pixels * said.get("rescale_factor", 1 / 255)
    if said.get("do_normalize", True):
        centre, spread = (np.array(said[key]).reshape(1, 3, 1, 1) for key in ("image_mean", "image_std"))
        flipped = pixels[:, ::-1] if said.get("do_flip_channel_order") else pixels
        pixels = (flipped - centre) / spread
    elif said.get("do_flip_channel_order"):
        pixels = pixels[:, ::-1]
    model = transformers.AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        given = torch.tensor(pixels.copy(), dtype=torch.float32)
        both = [model(each, output_hidden_states=True).hidden_states[-1] for each in (given, given.flip(-1))]
    found = specified_map(chosen, (3, 16, 16))
    np.testing.assert_allclose(found(images), averaged(both), atol=2e-3)
    usual = specified_map(replace(chosen, model=str(image_model)), (3, 16, 16)).settings()
    assert (found.settings() | {"source": ""} == usual | {"source": ""}) == (keys in ({}, USUAL_KEYS))


@pytest.mark.parametrize("keys", [{"rescale_offset": True}, {"rescale_factor": "1"}])
def test_preprocessing_that_is_not_supported_is_refused(
    keys: dict[str, Any], image_model: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(image_model, tmp_path / "model"))
    said = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps(said | keys))
    with pytest.raises(InputError, match="rescale_factor is not a number"):
        specified_map(FeaturesSpec(kind="transformers", model=str(folder)), (3, 16, 16))


def test_token_ids_that_a_model_does_not_know_are_refused(text_model: Path) -> None:
    features = specified_map(FeaturesSpec(kind="transformers", model=str(text_model), size=4), (4,))
    known = len(WORDS) + 4
    assert features(np.array([[2, known - 1, 3, -1]])).shape == (1, 48)
    for ids in ([[2, known, 3, -1]], [[2, -2, 3, -1]], [[2.0, 4.5, 3.0, -1.0]]):
        with pytest.raises(UnusableSamplesError, match=f"whole numbers from 0 to {known - 1}"):
            features(np.array(ids))
    with pytest.raises(UnusableSamplesError, match="convert them to int32"):
        features(np.array([[2, 5, 4, 3]], dtype=np.uint8))
    clients = {f"c{n}": (np.array([[2, 4 + n, 3, -1], [2, 40 * (n == 2), 3, -1]]), [0, 1]) for n in range(3)}
    spec = {"model": {"kind": "ridge", "outputs": 2}, "features": {"kind": "transformers", "model": str(text_model)}}
    with pytest.raises(RoundRejectedError, match=r"'c2' were refused .* whole numbers from 0 to 13"):
        sifu.train(spec, run=text_model.parent / "run", clients=clients)


@pytest.mark.parametrize("kind", ["transformers", "module"])
def test_grey_images_need_no_axis_for_their_channel(kind: str, image_model: Path) -> None:
    x = np.random.default_rng(0).random((3, 16, 16))
    if kind == "module":  # a user's module gets the samples as they are
        network = NetworkFeatures(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(256, 4)), (16, 16))
        assert network(x).shape == (3, 4)
        return
    grey = specified_map(FeaturesSpec(kind="transformers", model=str(image_model)), (16, 16))
    np.testing.assert_array_equal(grey(x), grey(x[:, None]))
    with pytest.raises(UnusableSamplesError, match=r"made for \(1, 16, 16\)"):
        grey(x[:, :8])


@pytest.mark.parametrize("values", ["floats to 255", "integers", "bytes", "to one", "standardised"])
def test_images_in_another_range_are_refused(values: str, image_model: Path) -> None:
    features = specified_map(FeaturesSpec(kind="transformers", model=str(image_model)), (3, 16, 16))
    drawn = np.random.default_rng(0).integers(0, 256, (2, 3, 16, 16))
    given: dict[str, Any] = {
        "floats to 255": drawn.astype(np.float32),
        "integers": drawn,
        "bytes": drawn.astype(np.uint8),
        "to one": drawn / 255.0,
        "standardised": (drawn / 255.0 - 0.45) / 0.225,
    }
    if values in ("floats to 255", "integers"):
        with pytest.raises(UnusableSamplesError, match=r"from 0 to 1, found .* up to 255: divide them by 255"):
            features(given[values])
    else:
        assert features(given[values]).shape == (2, 48)
    np.testing.assert_allclose(features(given["bytes"]), features(given["to one"]), atol=1e-4)


@pytest.mark.parametrize("part", ["running_mean", "running_var", "num_batches_tracked"])
def test_missing_running_statistics_are_refused(part: str, tmp_path: Path) -> None:
    """Without them, batch normalisation would use a mean of 0 and a variance of 1; a count is not used at all."""
    torch.manual_seed(1)
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    whole = transformers.ResNetModel(config)
    kept = {name: value for name, value in whole.state_dict().items() if not name.endswith(part)}
    whole.save_pretrained(tmp_path, state_dict=kept)
    prepared = {"size": {"height": 16, "width": 16}, "image_mean": [0.5] * 3, "image_std": [0.25] * 3}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(prepared))
    features = FeaturesSpec(kind="transformers", model=str(tmp_path), layers="last")
    if part == "num_batches_tracked":
        assert specified_map(features, (3, 16, 16)).features == 16
        return
    with pytest.raises(InputError, match=f"lack .* of the model's weights .*{part}"):
        specified_map(features, (3, 16, 16))


@pytest.mark.parametrize("file", ["tokenizer.json", "model.safetensors", "config.json"])
def test_every_file_of_a_model_is_part_of_the_digest(text_model: Path, tmp_path: Path, file: str) -> None:
    folder = Path(shutil.copytree(text_model, tmp_path / "model"))
    features = FeaturesSpec(kind="transformers", model=str(folder), size=8)
    before = specified_map(features, (8,)).digest()
    assert before == specified_map(FeaturesSpec(kind="transformers", model=str(text_model), size=8), (8,)).digest()
    content = (folder / file).read_bytes()
    changed = content[:-1] + bytes([content[-1] ^ 1]) if file.endswith("safetensors") else content + b"\n"
    (folder / file).write_bytes(changed)
    assert specified_map(features, (8,)).digest() != before


def test_weights_outside_the_folder_are_refused(text_model: Path, tmp_path: Path) -> None:
    """The digest of the map covers the folder, so weights elsewhere could be replaced unnoticed."""
    from safetensors.torch import load_file, save_file

    folder = Path(shutil.copytree(text_model, tmp_path / "model"))
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    features, index = (
        FeaturesSpec(kind="transformers", model=str(folder), size=8),
        folder / "model.safetensors.index.json",
    )
    index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(weights, "part.safetensors")}))
    inside = specified_map(features, (8,)).digest()
    save_file({name: 2.0 * value for name, value in weights.items()}, folder / "part.safetensors", {"format": "pt"})
    assert specified_map(features, (8,)).digest() != inside  # negative control: a file of the folder is covered
    save_file(weights, tmp_path / "part.safetensors", {"format": "pt"})
    for outside in ("../part.safetensors", str(tmp_path / "part.safetensors")):
        index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(weights, outside)}))
        with pytest.raises(InputError, match="all files of a model must be in its folder"):
            specified_map(features, (8,))
    for odd in ("[]", "{", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}'):
        index.write_text(odd)
        with pytest.raises(InputError, match="is not a list of weight files"):
            specified_map(features, (8,))


def test_an_adapter_on_a_model_elsewhere_is_refused(text_model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(text_model, tmp_path / "model"))
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(text_model)}))
    with pytest.raises(InputError, match="merge the adapter"):
        specified_map(FeaturesSpec(kind="transformers", model=str(folder), size=8), (8,))


def test_a_tokenizer_that_was_replaced_is_read_again(text_model: Path, tmp_path: Path) -> None:
    """A service that stays alive must not code texts with the tokenizer that it read before."""
    folder = Path(shutil.copytree(text_model, tmp_path / "model"))
    before = tokenised(str(folder), ["good film"], 6).tolist()
    other = save_text_model(tmp_path / "other", WORDS[::-1])
    shutil.copy(other / "tokenizer.json", folder / "tokenizer.json")
    after = tokenised(str(folder), ["good film"], 6).tolist()
    assert after == tokenised(str(other), ["good film"], 6).tolist() != before


def test_a_tokenizer_that_draws_is_refused(text_model: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    folder = Path(shutil.copytree(text_model, tmp_path / "model"))
    for dropout in (None, 0.5):
        words = {"[UNK]": 0, "a": 1, "b": 2, "ab": 3}
        Tokenizer(models.BPE(words, [("a", "b")], dropout=dropout, unk_token="[UNK]")).save(
            str(folder / "tokenizer.json")
        )
        if dropout is None:
            assert len({tokenised(str(folder), ["ab" * 8], 20).tobytes() for _ in range(5)}) == 1
            continue
        with pytest.raises(InputError, match="splits words at random"):
            tokenised(str(folder), ["ab"], 20)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype", "hidden_dropout_prob", "gradient_checkpointing"])
def test_settings_for_training_change_no_feature(text_model: Path, tmp_path: Path, key: str) -> None:
    """Half precision, dropout and checkpoints of a configuration: features stay deterministic, in float32."""
    folder = Path(shutil.copytree(text_model, tmp_path / "model"))
    said = json.loads((folder / "config.json").read_text())
    value = {"hidden_dropout_prob": 0.9, "gradient_checkpointing": True}.get(key, "float16")
    (folder / "config.json").write_text(json.dumps(said | {key: value}))
    rows = tokenised(str(text_model), TEXTS, 8)
    plain, changed = (
        specified_map(FeaturesSpec(kind="transformers", model=str(model), size=8), (8,))
        for model in (text_model, folder)
    )
    np.testing.assert_array_equal(plain(rows), changed(rows))
    assert plain.digest() != changed.digest()


@pytest.mark.parametrize("setting", [{"padding_side": "left"}, {"truncation_side": "left"}, {"model_max_length": 4}])
def test_a_text_has_the_same_tokens_next_to_any_other(
    text_model: Path, tmp_path: Path, setting: dict[str, Any]
) -> None:
    folder = Path(shutil.copytree(text_model, tmp_path / "model"))
    said = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(said | setting))
    together = tokenised(str(folder), TEXTS, 6)
    np.testing.assert_array_equal(together, np.concatenate([tokenised(str(folder), [text], 6) for text in TEXTS]))


def test_files_are_hashed_once_per_process(text_model: Path) -> None:
    transformer_networks._file_digest.cache_clear()
    digests = {transformer_networks.files_digest(text_model) for _ in range(5)}
    assert len(digests) == 1
    assert transformer_networks._file_digest.cache_info().misses == len(
        {path for pattern in transformer_networks.FILES for path in text_model.glob(pattern)}
    )


def test_what_is_no_model_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text_model: Path) -> None:
    import huggingface_hub

    def unreachable(*arguments: Any, **options: Any) -> str:
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(InputError, match="hf download somebody/small --local-dir FOLDER"):
        transformer_networks.model_folder("somebody/small")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(InputError, match=r"weights in \*\.safetensors"):
        transformer_networks.model_folder(str(tmp_path))
    with pytest.raises(InputError, match=r"no readable preprocessor_config\.json"):
        specified_map(FeaturesSpec(kind="transformers", model=str(text_model)), (3, 16, 16))


def test_code_that_comes_with_a_model_is_not_run(text_model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(text_model, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "unheard-of", "auto_map": {"AutoConfig": "own.Config", "AutoModel": "own.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w').close()\n")
    with pytest.raises(InputError, match="cannot be loaded"):
        specified_map(FeaturesSpec(kind="transformers", model=str(folder)), (8,))
    assert not (tmp_path / "marker").exists()


def test_missing_texts_and_tokenizers_are_one_sentence(text_model: Path, tmp_path: Path) -> None:
    features = FeaturesSpec(kind="transformers", model=str(text_model), size=8)
    for texts in (["good", None], [None, "good"]):
        with pytest.raises(InputError, match="a text was expected, found None"):
            texts_as_tokens(texts, features)
    for name in ("config.json", "model.safetensors"):  # the library would make a tokenizer that knows no word
        (tmp_path / name).write_bytes((text_model / name).read_bytes())
    with pytest.raises(InputError, match=r"has no tokenizer: add tokenizer\.json"):
        tokenised(str(tmp_path), ["good film"], 8)


@pytest.mark.parametrize("kind", ["deep", "last"])
def test_weights_that_the_files_lack_are_refused(tmp_path: Path, kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The library would draw them at random: other features in each process, under the same digest."""
    folder = save_text_model(tmp_path / "model", WORDS)
    whole = transformers.AutoModel.from_pretrained(folder)
    features = FeaturesSpec(kind="transformers", model=str(folder), size=8, layers=kind)

    def save_without(part: str) -> None:
        kept = {name: weight for name, weight in whole.state_dict().items() if part not in name}
        whole.save_pretrained(folder, state_dict=kept)

    save_without("pooler")  # not used
    capfd.readouterr()
    assert specified_map(features, (8,)).features == (48 if kind == "deep" else 16)
    assert capfd.readouterr() == ("", "")
    save_without("layer.1.output")
    with pytest.raises(InputError, match=r"lack 4 of the model's weights \(encoder\.layer\.1\.output"):
        specified_map(features, (8,))


def test_an_encoder_saved_without_its_decoder(tmp_path: Path, text_model: Path) -> None:
    torch.manual_seed(1)
    config = transformers.T5Config(vocab_size=20, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2)
    model = transformers.T5EncoderModel(config).eval()
    model.save_pretrained(tmp_path)
    ids = tokenised(str(text_model), ["good film", "the film very bad"], 8)
    rows = specified_map(FeaturesSpec(kind="transformers", model=str(tmp_path), size=8, layers="last"), (8,))(ids)
    for row, found in zip(ids, rows, strict=True):
        with torch.no_grad():
            last = model(torch.tensor(row[row >= 0][None]).long()).last_hidden_state[0].mean(dim=0).double().numpy()
        np.testing.assert_allclose(found, 10.0 * last / np.linalg.norm(last), atol=1e-4)


def test_channels_are_those_of_the_model(tmp_path: Path, image_model: Path) -> None:
    torch.manual_seed(1)
    config = transformers.ViTConfig(image_size=16, patch_size=8, num_channels=1, **SIZES)
    transformers.ViTModel(config).save_pretrained(tmp_path)
    prepared = {"size": {"height": 16, "width": 16}, "image_mean": [0.5], "image_std": [0.5]}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(prepared))
    grey = FeaturesSpec(kind="transformers", model=str(tmp_path))
    assert specified_map(grey, (1, 16, 16)).features == 48
    for model, channels, taken in ((tmp_path, 3, 1), (image_model, 4, 3)):
        with pytest.raises(InputError, match=f"images have {channels} channels, and ViTModel takes {taken}"):
            specified_map(FeaturesSpec(kind="transformers", model=str(model)), (channels, 16, 16))


def test_texts_that_a_model_cannot_read_are_one_sentence(tmp_path: Path, text_model: Path) -> None:
    with pytest.raises(InputError, match=r"which has 16 positions cannot process texts .* set features\.size"):
        specified_map(FeaturesSpec(kind="transformers", model=str(text_model)), (128,))
    folder = save_text_model(tmp_path / "small", WORDS[:4])
    for file in text_model.glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    with pytest.raises(InputError, match="produced token 8, and the model knows 8 tokens"):
        tokenised(str(folder), ["good film"], 8)
    assert tokenised(str(folder), ["good"], 3).tolist() == [[2, 4, 3]]
    config = transformers.CanineConfig(
        **SIZES, max_position_embeddings=64, local_attention_window=8, downsampling_rate=2, num_hash_buckets=32
    )
    transformers.CanineModel(config).save_pretrained(tmp_path / "merging")
    with pytest.raises(InputError, match="CanineModel merges tokens"):
        specified_map(FeaturesSpec(kind="transformers", model=str(tmp_path / "merging"), size=16), (16,))


def table_of(folder: Path, clients: int = 5, rows: int = 8) -> Path:
    drawn = np.random.default_rng(4)
    file = folder / "reviews.csv"
    with file.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["number", "site", "review", "verdict"])
        for row in range(clients * rows):
            verdict = "up" if row % 2 else "down"
            word = ("good", "fine") if row % 2 else ("bad", "poor")
            text = f"the {drawn.choice(['film', 'book'])} very {drawn.choice(word)}"
            writer.writerow([f"n{row}", f"site-{row % clients}", text, verdict])
    return file


def spec_of(file: Path, model: Path, **features: Any) -> dict[str, Any]:
    return {
        "data": {
            "name": "table", "file": str(file), "partition": "given", "label": "verdict", "client": "site",
            "id": "number", "text": "review", "classes": "down,up", "preprocessing": "fixed",
        },
        "model": {"kind": "ridge"},
        "features": {"kind": "transformers", "model": str(model), "size": 8} | features,
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["ridge", "softmax"])
def test_a_column_of_texts_goes_from_a_table_to_a_prediction(tmp_path: Path, text_model: Path, kind: str) -> None:
    file = table_of(tmp_path)
    spec = spec_of(file, text_model) | {"model": {"kind": kind}, "stop": {"max_rounds": 3, "target": 0.0}}
    run = sifu.train(spec, run=tmp_path / "run")
    (outcome,) = run.forget(["site-2"])
    if kind == "ridge":
        assert outcome.level == "exact"
        assert run.evaluate("training").accuracy == 1.0
    assert verify_run(run.folder).problems == []
    assert sifu_verifier.verify(run.folder) == []
    exported = run.export(tmp_path / "model.safetensors")
    described = json.loads((tmp_path / "model.safetensors.json").read_text())
    assert described["features"]["model"] == str(text_model)
    with RunReader(run.folder) as reader:
        assert described["features_digest"] == reader.facts["features"]
    loaded = sifu.load_model(exported)
    predicted = loaded.predict_rows(file)
    assert [row.id for row in predicted[:2]] == ["n0", "n1"]
    texts = [row["review"] for row in csv.DictReader(file.open())]
    assert [row.prediction for row in predicted] == [("down", "up")[index] for index in loaded.predict(texts)]
    with pytest.raises(InputError, match="tokenizer of a text cannot be part of an ONNX graph"):
        run.export(tmp_path / "model.onnx")


def test_records_and_newcomers_of_texts(tmp_path: Path, text_model: Path) -> None:
    run = sifu.train(spec_of(table_of(tmp_path), text_model), run=tmp_path / "run")
    (tmp_path / "late").mkdir()
    late = table_of(tmp_path / "late", clients=1)
    late.write_text(late.read_text().replace("site-0", "site-9"))
    assert run.join(file=late) == ["site-9"]
    outcome = run.forget(["site-1"], records=["n1"])[0]
    assert outcome.level == "exact"
    assert verify_run(run.folder).problems == []


@pytest.mark.parametrize("kind", [list, np.array, lambda texts: np.array(texts, dtype=object)])
def test_texts_in_python(tmp_path: Path, text_model: Path, kind: Callable[[list[str]], Any]) -> None:
    texts = ["good film", "bad book", "fine film", "poor book"]
    clients = {f"c{number}": (kind(texts), [1, 0, 1, 0]) for number in range(4)}
    spec = {
        "data": {"preprocessing": "fixed"},
        "model": {"kind": "ridge", "outputs": 2},
        "features": {"kind": "transformers", "model": str(text_model), "size": 8},
    }
    run = sifu.train(spec, run=tmp_path / "run", clients=clients)
    assert run.model().predict(kind(["good film", "poor book"])).tolist() == [1, 0]
    assert run.forget(["c1"])[0].level == "exact"


def test_an_image_model_goes_from_a_file_to_a_prediction(tmp_path: Path, image_model: Path) -> None:
    drawn = np.random.default_rng(0)
    x, y = drawn.integers(0, 256, (40, 8, 8, 3), dtype=np.uint8), np.arange(40) % 2
    x[y == 1, :4] //= 4
    np.savez(tmp_path / "own.npz", x=x, y=y, client=np.arange(40) // 8)
    spec = {
        "data": {"name": "npz", "file": str(tmp_path / "own.npz"), "partition": "given", "preprocessing": "fixed"},
        "model": {"kind": "ridge", "outputs": 2},
        "features": {"kind": "transformers", "model": str(image_model)},
    }
    run = sifu.train(spec, run=tmp_path / "run")
    assert run.forget(["2"])[0].level == "exact"
    assert verify_run(run.folder).problems == []
    loaded = sifu.load_model(run.export(tmp_path / "model.safetensors"))
    assert np.mean(loaded.predict(x) == y) > 0.9


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({"features": {"kind": "transformers"}}, r"features\.model must be given"),
        ({"features": {"model": "somebody/small"}}, r"features\.model must be given"),
        ({"data": {"text": "review"}}, r"data\.text must be empty unless"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(tmp_path: Path, sections: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        sifu.train(sections, run=tmp_path / "run")
