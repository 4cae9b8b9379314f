"""CelebA's official file formats, with twelve faces instead of 202,599."""

from __future__ import annotations

import io
import zipfile

import numpy as np
import pytest

from sifu.errors import InputError
from sifu_paper.data.celeba import FILES, find, read_celeba


@pytest.mark.parametrize("zipped", [True, False])
def test_faces_are_resized_and_sorted_by_person(tmp_path, write_celeba, zipped):
    facts = write_celeba(tmp_path, zipped=zipped)
    assert find(tmp_path) == tmp_path
    read = read_celeba(tmp_path)
    assert read.x_train.shape == (7, 64, 64, 3)
    assert read.x_test.shape == (4, 64, 64, 3)
    for split, part in (("train", 0), ("test", 2)):
        rows = sorted((identity, name, smiling) for name, (smiling, identity, p) in facts.items() if p == part)
        assert getattr(read, f"client_{split}").tolist() == [identity for identity, _, _ in rows]
        assert getattr(read, f"y_{split}").tolist() == [smiling for _, _, smiling in rows]
    assert not set(read.client_train) & set(read.client_test)


def test_a_pixel_is_pillows_bilinear_resize(tmp_path, write_celeba):
    from PIL import Image

    write_celeba(tmp_path)
    read = read_celeba(tmp_path)
    with zipfile.ZipFile(tmp_path / "img_align_celeba.zip") as file:
        # Image 7 has the lowest identity number of the training part (6 and 7 share it).
        content = file.read("img_align_celeba/000006.jpg")
    expected = Image.open(io.BytesIO(content)).resize((64, 64), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(read.x_train[0], np.asarray(expected))


@pytest.mark.parametrize("file", FILES)
def test_every_file_is_needed(tmp_path, write_celeba, file):
    write_celeba(tmp_path)
    (tmp_path / file).unlink()
    assert find(tmp_path) is None


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("list_attr_celeba.txt", "Smiling", "Smirking", "has no attribute Smiling; it has Male, Smirking"),
        ("list_attr_celeba.txt", "12\n", "13\n", "announces 13 images but lists 12"),
        ("list_attr_celeba.txt", "12\n", "", "does not start with a count"),
        ("list_attr_celeba.txt", "000003.jpg  1", "000003.jpg", "bad line for '000003.jpg'"),
        ("identity_CelebA.txt", "000003.jpg 9", "000003.jpg nine", "has the line '000003.jpg nine'"),
        ("identity_CelebA.txt", "000003.jpg", "../../03.jpg", "not a bare file name"),
        ("identity_CelebA.txt", "000003.jpg 9\n", "", "lists 000003.jpg and 0 more images that identity_CelebA"),
        ("list_eval_partition.txt", "000001.jpg 0", "\x80\xff", "cannot be read as plain text"),
    ],
)
def test_damaged_text_is_refused(tmp_path, write_celeba, file, old, new, message):
    write_celeba(tmp_path)
    path = tmp_path / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="latin1")
    with pytest.raises(InputError, match=message):
        read_celeba(tmp_path)


def test_a_damaged_or_missing_face_is_refused(tmp_path, write_celeba):
    write_celeba(tmp_path, zipped=False)
    face = tmp_path / "img_align_celeba" / "000002.jpg"
    face.write_bytes(face.read_bytes()[:100])
    with pytest.raises(InputError, match=r"image 000002\.jpg is not a readable jpeg"):
        read_celeba(tmp_path)
    face.unlink()
    with pytest.raises(InputError, match=r"image 000002\.jpg cannot be read") as refusal:
        read_celeba(tmp_path)
    assert str(face) in str(refusal.value)
    assert str(tmp_path / face.name) not in str(refusal.value)  # it was never in that folder


def test_a_damaged_zip_is_refused(tmp_path, write_celeba):
    write_celeba(tmp_path)
    path = tmp_path / "img_align_celeba.zip"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=r"img_align_celeba\.zip cannot be read"):
        read_celeba(tmp_path)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("img_align_celeba/other.jpg", b"")
    with pytest.raises(InputError, match=r"has no image 00000\d\.jpg"):
        read_celeba(tmp_path)


def test_an_image_too_large_for_a_face_is_refused(tmp_path, write_celeba, monkeypatch):
    write_celeba(tmp_path)
    monkeypatch.setattr("sifu_paper.data.celeba.LARGEST_SIDE", 20)
    with pytest.raises(InputError, match="has 17x21 pixels; CelebA's have 178x218"):
        read_celeba(tmp_path)
