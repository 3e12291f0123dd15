"""Tensors of every kind become the same bytes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from stitch.core.errors import InvalidRequest
from stitch.weights.header import DTYPES
from stitch.weights.safetensors import write_checkpoint
from stitch.weights.tensors import host_tensor, iterate

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("name", sorted(DTYPES))
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3), (2, 0, 3)])
def test_numpy(name: str, shape: tuple[int, ...]) -> None:
    array = np.arange(int(np.prod(shape))).reshape(shape).astype(DTYPES[name])
    tensor = host_tensor("t", array)
    assert (tensor.name, tensor.dtype, tensor.shape) == ("t", name, shape)
    assert bytes(tensor.data) == array.tobytes()
    assert tensor.data.readonly
    assert tensor.data.format == "B"
    assert tensor.array().tobytes() == array.tobytes()
    assert tensor.array().shape == shape


def test_order_of_memory_does_not_matter() -> None:
    array = np.arange(24, dtype=np.int16).reshape(4, 6)
    for view in (array.T, array[::2, ::-1], np.asfortranarray(array)):
        assert bytes(host_tensor("t", view).data) == view.tobytes()
    swapped = array.astype(">i2")
    assert bytes(host_tensor("t", swapped).data) == array.tobytes()
    assert host_tensor("t", swapped).dtype == "I16"
    assert host_tensor("t", np.float32(2.5)).shape == ()


@pytest.mark.parametrize("value", ["text", [1.0], 3.5, None, np.array(["a"]), np.array([None]), np.zeros(2, np.complex64)])
def test_what_is_no_tensor_is_named(value: object) -> None:
    with pytest.raises(InvalidRequest, match=r"'layer\.7'") as caught:
        host_tensor("layer.7", value)
    assert caught.value.field == "weights[layer.7]"


@pytest.mark.parametrize("name", ["", "n" * 2000, "__metadata__", "\ud800", 3, None])
def test_names_are_checked(name: object) -> None:
    with pytest.raises(InvalidRequest):
        host_tensor(name, np.zeros(1))  # type: ignore[arg-type]


def test_too_many_dimensions() -> None:
    with pytest.raises(InvalidRequest, match="40 dimensions"):
        host_tensor("t", np.zeros((1,) * 40))


def test_the_three_forms_agree(tmp_path: Path) -> None:
    weights = {"b": np.arange(3, dtype=np.float32), "a": np.ones((2, 2), ml_dtypes.bfloat16)}
    write_checkpoint(tmp_path, weights)
    forms = [weights, iter(weights.items()), tmp_path, list(iterate(weights))]
    rows = [[(t.name, t.dtype, t.shape, bytes(t.data)) for t in iterate(form)] for form in forms]  # type: ignore[arg-type]
    assert rows[0] == rows[1] == rows[2] == rows[3]
    assert len(rows[0]) == 2


def test_malformed_iterables() -> None:
    with pytest.raises(InvalidRequest, match=r"weights\[0\]: a str"):
        list(iterate("directory"))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"weights\[1\]: a tuple"):
        list(iterate([("a", np.zeros(1)), ("b",)]))  # type: ignore[list-item]
    with pytest.raises(InvalidRequest, match="'a' is given twice"):
        list(iterate([("a", np.zeros(1)), ("a", np.zeros(1))]))


def test_torch_is_not_imported() -> None:
    code = (
        "import sys, numpy\n"
        "import stitch.weights.staging, stitch.weights.encode\n"
        "from stitch.weights.tensors import host_tensor\n"
        "host_tensor('a', numpy.zeros(1))\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.torch
class TestTorch:
    @pytest.fixture
    def torch(self):  # type: ignore[no-untyped-def]
        return pytest.importorskip("torch")

    def test_every_dtype(self, torch) -> None:  # type: ignore[no-untyped-def]
        for name, dtype in DTYPES.items():
            data = np.arange(48, dtype=np.uint8) % 2
            expected = data.view(dtype)
            kind = {"BOOL": "bool", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"}
            plain = {"U": "uint", "I": "int", "F": "float", "B": "bfloat"}
            attribute = kind.get(name) or plain[name[0]] + name.lstrip("UIFB")
            tensor = torch.from_numpy(data.copy()).view(getattr(torch, attribute))
            found = host_tensor(name, tensor)
            assert (found.dtype, found.shape) == (name, expected.shape)
            assert bytes(found.data) == data.tobytes()

    def test_views_parameters_scalars_and_empty(self, torch) -> None:  # type: ignore[no-untyped-def]
        base = torch.arange(12, dtype=torch.float32).reshape(3, 4).to(torch.bfloat16)
        expected = np.arange(12).reshape(3, 4).astype(ml_dtypes.bfloat16)
        assert bytes(host_tensor("t", base.T).data) == expected.T.tobytes()
        assert bytes(host_tensor("t", torch.nn.Parameter(base)).data) == expected.tobytes()
        assert host_tensor("t", torch.tensor(1.5)).shape == ()
        assert bytes(host_tensor("t", torch.tensor(1.5)).data) == np.float32(1.5).tobytes()
        assert host_tensor("t", torch.zeros((0, 3))).shape == (0, 3)

    def test_what_cannot_be_taken_is_named(self, torch) -> None:  # type: ignore[no-untyped-def]
        for value, why in [
            (torch.zeros(2, device="meta"), "meta"),
            (torch.eye(3).to_sparse(), "layout"),
            (torch.zeros(2, dtype=torch.complex64), "complex64"),
        ]:
            with pytest.raises(InvalidRequest, match="'layer'") as caught:
                host_tensor("layer", value)
            assert why in str(caught.value)
