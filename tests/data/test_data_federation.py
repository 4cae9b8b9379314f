"""Clients from a split data set, from arrays and from torch; errors name the client."""

from __future__ import annotations

import numpy as np
import pytest

from sifu.data import ClientData, from_arrays, from_dataset, from_torch, load, partition
from sifu.errors import InputError

X = np.arange(6.0).reshape(3, 2)
Y = np.array([0, 1, 0])


@pytest.fixture(scope="module")
def digits():
    return load("digits")


def test_clients_of_a_split_data_set(digits):
    parts = partition("one_class", digits.y_train, 10, 50, np.random.default_rng(0))
    clients = from_dataset(digits, parts)
    assert [client.name for client in clients] == [f"client-{k:03d}" for k in range(10)]
    features = digits.features()
    for client, part in zip(clients, parts, strict=True):
        assert (client.samples, client.x.shape, client.x.dtype) == (50, (50, 64), np.float64)
        np.testing.assert_array_equal(client.x, features[part])
        np.testing.assert_array_equal(client.y, digits.y_train[part])


def test_shape_type_and_names_as_asked(digits):
    parts = [np.array([0, 1]), np.array([5])]
    clients = from_dataset(digits, parts, "float32", False, "standard", names=["north", "south"])
    assert [(client.name, client.x.shape) for client in clients] == [("north", (2, 1, 8, 8)), ("south", (1, 1, 8, 8))]
    assert clients[0].x.dtype == np.float32
    assert clients[0].x.min() == -1.0


def test_names_are_padded_to_sort(digits):
    clients = from_dataset(digits, [np.array([row]) for row in range(1001)])
    assert clients[7].name == "client-0007"
    assert [client.name for client in clients] == sorted(client.name for client in clients)


@pytest.mark.parametrize(
    ("parts", "names", "message"),
    [
        ([[0, 1], [1, 2]], None, "row 1 is given to both 'client-000' and 'client-001'"),
        ([[0, 0]], None, "'client-000' is given 1 of its rows twice"),
        ([[0], [1600]], None, "'client-001' is given rows 1600 to 1600, but data set 'digits' has rows 0 to 1599"),
        ([[-1]], None, "rows -1 to -1"),
        ([[0], []], None, "'client-001' holds no samples"),
        ([], None, "at least one client"),
        ([[0], [1]], ["a"], "1 names were given for 2 clients"),
        ([[0], [1]], ["a", "a"], "two clients have the name 'a'"),
        ([[0], [1]], ["a", " "], "has the name ' '"),
    ],
)
def test_bad_parts_are_refused(digits, parts, names, message):
    with pytest.raises(InputError, match=message):
        from_dataset(digits, [np.array(part, dtype=np.int64) for part in parts], names=names)


def test_arrays_keep_their_order_and_become_floats():
    clients = from_arrays({"b": (X.astype(int), Y.astype(np.uint8)), "a": (X.tolist(), Y.tolist())})
    assert [client.name for client in clients] == ["b", "a"]
    for client in clients:
        np.testing.assert_array_equal(client.x, X)
        assert (client.x.dtype, client.y.dtype) == (np.float64, np.int64)


def test_float_labels_are_regression():
    (client,) = from_arrays({"a": (X, Y / 2)}, dtype="float32")
    assert client.y.dtype == np.float32


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({}, "at least one client"),
        ({"": (X, Y)}, "has the name ''"),
        ({7: (X, Y)}, "has the name 7"),
        ({"a": (X, Y[:2])}, "client 'a' has 3 samples in x but 2 labels in y"),
        ({"a": (X[:0], Y[:0])}, "client 'a' holds no samples"),
        ({"a": (X, Y), "b": (np.where(X > 3, np.nan, X), Y)}, "x of client 'b' holds 2 values that are NaN or Inf"),
        ({"a": (X, [0.0, np.inf, 1.0])}, "y of client 'a' holds 1 values"),
        ({"a": (X, -Y)}, "client 'a' has the class number -1"),
        ({"a": (X[:, 0], Y)}, r"x of client 'a' has shape \(3,\)"),
        ({"a": X}, "client 'a' has a ndarray instead of a pair"),
        ({"a": (X, ["u", "v", "w"])}, "y of client 'a' has type <U1"),
        ({"a": ([[1, 2], [3]], [0, 1])}, "x of client 'a' cannot be read"),
        ({"a": (X, Y), "b": (X[:, :1], Y)}, r"client 'b' has samples of shape \(1,\), but client 'a' has \(2,\)"),
        ({"a": (X, Y), "b": (X, Y / 2)}, "client 'b' has labels of type float64"),
    ],
)
def test_bad_arrays_are_refused_by_client(arrays, message):
    with pytest.raises(InputError, match=message):
        from_arrays(arrays)


def test_what_overflows_float32_is_refused():
    with pytest.raises(InputError, match="x of client 'a' holds 1 values that are NaN or Inf"):
        from_arrays({"a": (np.array([[1e300]]), [0])}, dtype="float32")
    with pytest.raises(InputError, match="'int8' is not supported"):
        from_arrays({"a": (X, Y)}, dtype="int8")


def test_a_client_alone_is_checked_too():
    with pytest.raises(InputError, match="3 samples in x but 1 labels"):
        ClientData("a", X, Y[:1])


def test_torch_data_sets_are_read_once():
    torch = pytest.importorskip("torch")

    class Counting(torch.utils.data.Dataset):
        def __init__(self):
            self.reads = []

        def __len__(self):
            return 3

        def __getitem__(self, row):
            self.reads.append(row)
            return torch.tensor(X[row], requires_grad=True), int(Y[row])

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter([(torch.tensor(x), y) for x, y in zip(X, Y, strict=True)])

    counting = Counting()
    tensors = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    clients = from_torch({"a": counting, "b": tensors, "c": Stream()}, dtype="float32")
    assert counting.reads == [0, 1, 2]
    for client in clients:
        np.testing.assert_array_equal(client.x, X)
        np.testing.assert_array_equal(client.y, Y)
        assert client.x.dtype == np.float32
    with pytest.raises(InputError, match="client 'e' holds no samples"):
        from_torch({"e": torch.utils.data.TensorDataset(torch.zeros(0, 2), torch.zeros(0))})
    with pytest.raises(InputError, match="sample 0 of client 'e' is a tuple, not a pair"):
        from_torch({"e": torch.utils.data.TensorDataset(torch.zeros(1, 2))})
    with pytest.raises(InputError, match=r"x of sample 1 of client 'e' has type float32 and shape \(3,\)"):
        from_torch({"e": [(torch.zeros(2), 0), (torch.zeros(3), 0)]})
    with pytest.raises(InputError, match="x of sample 0 of client 'e' has type object"):
        from_torch({"e": [(object(), 0)]})
