"""Errors for names of JAX and PyTorch that the package names otherwise: their fixes exist."""

from __future__ import annotations

import copy
import pickle
import re
from contextlib import ExitStack
from operator import attrgetter
from typing import Any

import pytest
import torch

import fshard as fs
from fshard._util.other_names import MESH_NAMES, OTHER_NAMES, PAIR_NAMES


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


def test_names_of_subpackages() -> None:
    with pytest.raises(AttributeError, match=r"'fshard.random' .*\n  fix:   fs.random.key\(0\)"):
        getattr(fs.random, "PRNGKey")  # noqa: B009
    with pytest.raises(AttributeError, match=r"fix:   did you mean 'adamw'\?"):
        getattr(fs.state, "adam")  # noqa: B009


MESH = fs.Mesh(x=2)
PAIR = fs.shard(torch.arange(4.0), MESH, fs.P("x"))
SCOPE = {"fs": fs, "P": fs.P, "mesh": MESH, "pair": PAIR, "rank": 0}


@pytest.mark.parametrize("name", PAIR_NAMES)
def test_fix_of_an_attribute_of_other_tensors_runs(name: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(PAIR, name)
    assert str(caught.value).endswith(f"no attribute {name!r}\n  fix:   {PAIR_NAMES[name]}")
    eval(PAIR_NAMES[name], SCOPE)


@pytest.mark.parametrize("name", MESH_NAMES)
def test_fix_of_an_attribute_of_other_meshes_runs(name: str) -> None:
    uses = {"__enter__": ExitStack().enter_context, "__getitem__": lambda mesh: mesh["x"]}
    use = uses.get(name, attrgetter(name))
    with pytest.raises((AttributeError, TypeError)) as caught:
        use(MESH)() if name == "__exit__" else use(MESH)
    assert str(caught.value).endswith(f"\n  fix:   {MESH_NAMES[name]}")
    if name not in ("__enter__", "__exit__"):
        eval(MESH_NAMES[name].partition("; ")[0], SCOPE)
    assert copy.deepcopy(pickle.loads(pickle.dumps(MESH))) == MESH
