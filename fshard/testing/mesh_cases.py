"""`meshes`: a test that runs on several meshes, simulated and on real processes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fshard._util.errors import fail
from fshard.layout.mesh import Mesh
from fshard.run.transports.torch_distributed import init
from fshard.testing.ranks import run_ranks


@dataclass(frozen=True, slots=True)
class MeshCase:
    """Mesh of one case of a test, and whether the test runs on real processes."""

    mesh: Mesh
    on_processes: bool

    def __str__(self) -> str:
        sizes = "_".join(f"{axis}{size}" for axis, size in self.mesh.shape.items())
        return f"{sizes}-processes" if self.on_processes else sizes


def meshes(
    *shapes: Mapping[str, int] | Mesh, processes: bool = False, timeout: float = 60.0
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Parametrise a pytest test over meshes, its argument `mesh`.

    Args:
        *shapes: meshes, or sizes by axis: `{"dp": 2, "tp": 2}`.
        processes: also run the test on one real process a rank of each mesh, after `fs.init(mesh)`;
            the test must be at the top level of its module, or a method there, and its other
            arguments must pickle.
        timeout: seconds until processes that have not answered are taken to hang.

    Returns:
        A decorator of test functions.

    Raises:
        ShardingError: a missing mesh, or a test without the argument `mesh`.

    >>> import fshard as fs
    >>> @fs.testing.meshes({"x": 2}, {"x": 2, "y": 3})
    ... def test_shard_keeps_values(mesh):
    ...     ...
    """
    import pytest

    where = "fs.testing.meshes"
    if not shapes:
        fail(where, "no mesh", "there must be at least one mesh", 'meshes({"dp": 2})')
    kinds = (False, True) if processes else (False,)
    cases = [
        MeshCase(shape if isinstance(shape, Mesh) else Mesh(shape), kind)
        for kind in kinds
        for shape in shapes
    ]

    def decorate(test: Callable[..., Any]) -> Callable[..., Any]:
        if "mesh" not in inspect.signature(test).parameters:
            name = test.__qualname__
            fail(where, f"{name}{inspect.signature(test)}", "the test must have an argument mesh",
                 f"def {name}(mesh): ...")  # fmt: skip

        @functools.wraps(test)
        def run(*args: Any, mesh: Any, **kwargs: Any) -> None:
            case = mesh if isinstance(mesh, MeshCase) else MeshCase(mesh, False)
            if case.on_processes:
                run_ranks(_run_on_rank, run, case.mesh, args, kwargs, nproc=case.mesh.size,
                          timeout=timeout)  # fmt: skip
            else:
                test(*args, mesh=case.mesh, **kwargs)

        parametrized: Callable[..., Any] = pytest.mark.parametrize("mesh", cases, ids=str)(run)
        return parametrized

    return decorate


def _run_on_rank(run: Any, mesh: Mesh, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run the test under a wrapper of `meshes` on this process's rank."""
    init(mesh)
    run.__wrapped__(*args, mesh=mesh, **kwargs)
