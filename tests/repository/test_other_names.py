"""Errors for names of JAX and PyTorch that the package names otherwise: their fixes exist."""

from __future__ import annotations

import re
from typing import Any

import pytest

import fshard as fs
from fshard._util.other_names import OTHER_NAMES


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_fix_of_a_name_of_other_packages_exists(name: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(fs, name)
    assert str(caught.value).endswith(f"has no attribute {name!r}\n  fix:   {OTHER_NAMES[name]}")
    for path in re.findall(r"fs\.([\w.]+)\(", OTHER_NAMES[name]):
        value: Any = fs
        for part in path.split("."):
            value = getattr(value, part)
        assert callable(value)


def test_missing_names() -> None:
    assert not hasattr(fs, "psun")
    with pytest.raises(AttributeError, match=r"fix:   did you mean 'psum'\?"):
        getattr(fs, "psun")  # noqa: B009 - no attribute that a type checker knows
