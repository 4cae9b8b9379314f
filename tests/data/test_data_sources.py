"""Lookup of data sets by name with `load`: the digits, a file, or data of an installed package."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint

import numpy as np
import pytest

import sifu
from sifu.data import Dataset, NamedData, Scale, load, sources
from sifu.errors import InputError


def two_images(folder, held_out_by):
    images, labels = np.full((2, 4, 4), 50, np.uint8), np.array([0, 1])
    return Dataset(f"ours in {folder}", images, labels, images, labels, ("a", "b"))


OURS = NamedData(two_images, 2, Scale(50.0, (0.5,), (0.25,)), (4, 4))


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Yield the data sets of installed packages by name; there are none unless a test adds one."""
    installed: dict[str, str] = {}
    monkeypatch.setattr(
        sources, "entry_points", lambda group: [EntryPoint(name, value, group) for name, value in installed.items()]
    )
    for cached in (sources._provided, sources._loaded):
        cached.cache_clear()
    yield installed
    for cached in (sources._provided, sources._loaded):
        cached.cache_clear()


def test_a_package_provides_a_data_set(packages, tmp_path):
    packages["ours"] = f"{__name__}:OURS"
    read = load("ours", tmp_path)
    assert read.name == f"ours in {tmp_path}"
    np.testing.assert_array_equal(read.features(), 1.0)
    np.testing.assert_array_equal(read.features(normalise="standard"), 2.0)


def centred_rows(folder, held_out_by):
    """Return rows minus the mean over all clients, as a careless package may provide them."""
    x = np.random.default_rng(0).random((12, 3)) + np.repeat(np.arange(3.0), 4)[:, None]
    owners = np.repeat(["a", "b", "c"], 4)
    none = np.zeros((0, 3)), np.zeros(0, np.int64)
    return Dataset("centred", x - x.mean(axis=0), np.arange(12) % 2, *none, ("no", "yes"), client_train=owners)


CENTRED = NamedData(centred_rows, 2, is_table=True)


@pytest.mark.parametrize(
    ("declared", "level", "status"), [("unknown", "conditional", "assumed"), ("fixed", "exact", "trusted")]
)
def test_preprocessing_by_a_package_is_not_taken_for_constants(packages, tmp_path, declared, level, status):
    packages["centred"] = f"{__name__}:CENTRED"
    spec = {
        "model": {"kind": "ridge"},
        "data": {"name": "centred", "partition": "given", "preprocessing": declared},
        "features": {"kind": "projection", "count": 2},
    }
    run = sifu.train(spec, run=tmp_path / "run")
    (outcome,) = run.forget(["c"], "gone")
    (premise,) = [each for each in run.certificate("gone").body["premises"] if each["name"] == "preprocessing"]
    assert (outcome.level, premise["status"]) == (level, status)


def test_an_entry_point_named_like_a_data_set_of_the_paper_is_not_the_papers(packages):
    packages.update(mnist="sifu_paper.data.public:MNIST", cifar10=f"{__name__}:OURS")
    constants = {name: sources.has_fixed_constants(name) for name in ("digits", "mnist", "celeba", "cifar10", "npz")}
    assert constants == {"digits": True, "mnist": True, "celeba": True, "cifar10": False, "npz": False}


def test_an_entry_point_that_is_no_data_set_is_refused(packages):
    packages["odd"] = f"{__name__}:two_images"
    with pytest.raises(InputError, match=r"'odd' of sifu\.data is a function, not a sifu\.data\.NamedData"):
        load("odd")


@pytest.mark.parametrize("name", sources.OF_THE_PAPER)
def test_a_data_set_of_the_paper_says_what_to_install(packages, name):
    with pytest.raises(InputError, match=f"{name!r} is not part of sifu: install .*pip install ./paper"):
        load(name)
    packages[name] = f"{__name__}:OURS"
    sources._provided.cache_clear()
    assert load(name).classes == ("a", "b")


@pytest.mark.parametrize(("name", "hint"), [("digit", "digits"), ("npz_file", "npz"), ("xyz", "write one of digits")])
def test_an_unknown_name_gets_the_nearest_known(packages, name, hint):
    with pytest.raises(InputError, match=f"{name!r} is unknown: .*{hint}"):
        load(name)


def test_importing_the_package_costs_numpy_only():
    script = (
        "import sys, sifu.data; print([m for m in ('torch', 'PIL', 'sklearn', 'scipy', 'ssl') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_own_files_by_path(tmp_path):
    path = tmp_path / "hospital.npz"
    np.savez(path, x=np.ones((3, 2)), y=[0, 1, 0])
    for read in (load("npz", path), load(f"npz:{path}"), load(str(path)), load("hospital.npz", tmp_path)):
        assert read.name == "npz:hospital"
    with pytest.raises(InputError, match="npz needs the path of a file"):
        load("npz")
    with pytest.raises(InputError, match=r"there is no file .*absent\.npz"):
        load("npz", tmp_path / "absent.npz")


def test_nan_in_a_file_names_the_array_and_the_count(tmp_path):
    path = tmp_path / "own.npz"
    np.savez(path, x=np.array([[1.0, np.nan], [np.inf, 2.0]]), y=[0, 1])
    with pytest.raises(InputError, match="x_train of data set 'npz:own' holds 2 values that are NaN or Inf out of 4"):
        load("npz", path)
