"""Tensors do not depend on the defaults that a script may set (set_default_device, set_default_dtype)."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torch.utils._device import _device_constructors

from tests.architecture.house import SOURCE, files, tree

# What torch.set_default_device works on.
ON_DEFAULT_DEVICE = {maker.__name__ for maker in _device_constructors()}
# Those whose dtype does not follow from what they are given.
OF_DEFAULT_DTYPE = {"empty", "empty_strided", "eye", "linspace", "logspace", "ones", "rand", "randn", "zeros"}


def calls_of_torch() -> Iterator[tuple[str, str, set[str | None]]]:
    """Place, name and keywords of every call `torch.name(...)`."""
    for path in files():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("torch."):
                keywords = {keyword.arg for keyword in node.keywords}
                yield f"{path.relative_to(SOURCE)}:{node.lineno}", ast.unparse(node.func)[6:], keywords


def test_every_new_tensor_names_its_device() -> None:
    assert "sparse_coo_tensor" in ON_DEFAULT_DEVICE
    silent = [
        f"{at} torch.{name}"
        for at, name, said in calls_of_torch()
        if name in ON_DEFAULT_DEVICE and "device" not in said
    ]
    assert not silent


def test_every_new_float_tensor_names_its_dtype() -> None:
    silent = [
        f"{at} torch.{name}"
        for at, name, said in calls_of_torch()
        if name in OF_DEFAULT_DTYPE and "dtype" not in said
    ]
    assert not silent
