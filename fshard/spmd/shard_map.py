"""`shard_map` and `local_map`: a per-device function, mapped over the shards of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from fshard.layout.mesh import Mesh
from fshard.spmd.mapped_function import map_function
from fshard.spmd.mesh_scope import check_axis_names, mapped_mesh, refuse_unknown_options


def shard_map(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    in_specs: Any,
    out_specs: Any,
    mesh: Mesh | None = None,
    axis_names: Iterable[str] = frozenset(),
    redistribute_inputs: bool = False,
    check: bool | str = True,
    **unknown: Any,
) -> Any:
    """Map a per-device function over the shards of global values; call or decorator form.

    Args:
        fn: the function of local values, which may call collectives by axis name; without it, a
            decorator is returned.
        in_specs: how each argument is sharded: one `P` for all, a tuple by position, or a dict by
            parameter name; tree prefixes of the arguments. A leaf is a `P`, a `Spec` (for uneven
            sizes), or None for a value that passes through, the same object on every rank.
        out_specs: how the results are assembled; a tree prefix of them. Axes that a `P` mentions
            shard a dim, or are unreduced or reduced; along the others results must be equal. None
            is for results other than tensors, which must be equal on every rank. Results are trees
            of tuples, lists, dicts and registered classes (optree's, PyTorch's).
        mesh: the mesh; None takes the mesh of the enclosing `shard_map`.
        axis_names: a set or tuple of the axes to map; empty means all that are not mapped yet.
            Specs name mapped axes only. Along other axes every rank computes the same.
        redistribute_inputs: redistribute pairs whose layout is not the one of `in_specs`; if
            False, such a pair is an error that shows the program.
        check: True tracks the types of all tensors (`fs.typeof`), inserts missing casts to
            varying, and checks the promises of `out_specs`. "strict" inserts no cast that changes
            a gradient: it reports the line and the cast to write. "values" also compares values
            that are promised equal, of arguments and results. "collectives" also compares every
            collective among its ranks before it is launched (under torchrun; a simulation always
            does); without it ranks that pass other shapes or dtypes may get wrong values, and gloo
            aborts a process that receives more than it expects (SIGABRT). False tracks nothing and
            costs nothing.
        **unknown: not an option; refused with a fix that translates options of JAX.

    Returns:
        The mapped function. A tensor argument is an unsharded global value, a pair `(local, spec)`
        one of which each process holds its part; if any argument is a pair, the results are pairs,
        else global tensors. Ranks outside of the mesh get empty results in the tree `out_specs`.

    Raises:
        ShardingError: specs that do not fit the mesh, the arguments or the results, each named by
            its path; with a check, types that do not show what `out_specs` promise, writes into
            arguments, and values that differ; a collective that was started and never waited for.

    Gradients: an argument is invariant along the axes that its spec leaves out. To use it with
    varying values takes `fs.pcast(x, axis, to="varying")`, whose transpose is the sum; checks
    insert it, once for each tensor. With `check=False` nothing sums the ranks' parts: a simulation
    raises where they differ, and under torchrun every rank keeps its part. Tensors that the
    function closes over, a module's parameters for example, are differentiated as arguments with
    `P()`. To the checks an `autograd.Function` is an operation of its rank: the gradient of an
    invariant result is summed already when its backward gets it, and `fs.psum` of it there would
    multiply it, as in JAX. Megatron's copy to the tensor-parallel region, of which the backward is
    an all-reduce, is such a function: `fs.pcast` takes its place, or `check=False` keeps it.

    Values that the host reads off varying tensors (`if`, `.item()`) are allowed: once all ranks
    have read some, results that must be equal are compared by value. If gradients are taken, ranks
    must not take different branches, as a rank that has not used a parameter or the result of a
    collective does not take part in its backward pass: `torch.where` chooses between values, also
    by `fs.axis_index`. Ranks raise for it: after such reads each gradient compares the collectives
    of its graph, in one gather of 8 bytes. Under `torchrun` some ranks may also read alone, to
    print a loss for example, and must not branch on it: nothing is compared, and gradients are
    those without the read. It waits until the others come to where they would be compared. A
    simulation refuses such a read before results that must be equal. Under `torchrun` ranks wait
    until the timeout if only some take a gradient; `check="collectives"` names ranks that differ
    there. Types do not see text (`str(x)`), errors that some ranks catch, tensor hooks, other
    threads, and containers that other code changes. A simulation therefore compares all results
    and gradients that must be equal, up to rounding. Under `torchrun` the comparison communicates,
    and only `check="values"` compares results whatever they depend on. With `check=False` the body
    may write into its arguments, also into memory that the caller shares with them, such as a
    pair's.

    `torch.func` transforms a mapped function and functions in the body. Forward mode runs the body
    with tangents beside values; gradients, and derivatives of them, replay what the body recorded,
    so Python state that has changed is not read again. A tangent of a gradient is the derivative of
    what the backward pass computes, as in PyTorch. In a simulation two tangents of a gradient are
    refused for operations of which PyTorch has other gradients of tangents: custom functions,
    norms, determinants and solvers. So are, with gradients within a tangent, gradients of it
    through softmax, `logsumexp` and norms, whose tangents PyTorch computes in place. PyTorch calls
    the `jvp` of a custom function without tangents: a `jvp` or `jacfwd` around another loses those
    of what it uses, here as on one device; `jvp(grad(f))` does not. In a simulation hooks in the
    body see the gradient of their rank, and in a second derivative its terms one by one. Hooks of
    modules (`register_full_backward_hook`) are refused there, and hooks in a `vmap` of gradients.
    PyTorch calls a hook at the innermost level of `torch.func` alone: gradients of other levels are
    refused in a body with hooks. Refused too are a `torch.library` operation in forward mode, to
    which PyTorch gives no tangent, and differentiated tensors from outside that the backward of an
    `autograd.Function` uses without having them as arguments.

    In the body of another `shard_map` further axes of the same mesh are mapped. An argument is then
    a value that this rank holds unsharded; it is sharded among the ranks that differ in the further
    axes alone. The check of the outer call holds. Pairs made there are sharded over axes not mapped
    yet, or are of the full mesh and equal along the mapped axes.

    In a function of `fs.partition` a mapped function on the same mesh is one operation. Its body
    runs at every call: it may use `nonzero` and branch on values, but the shapes of its results
    must not depend on them. It also runs once on zeros while the function is traced, for the
    layouts of results and the collectives that `explain()` counts. Tensors of the function are
    arguments of the mapped function, not closures; `torch.func` transforms are taken in the body.

    `torch.utils.checkpoint` in the body recomputes its part, around a call the call. The hooks of
    saved tensors around a simulated call, as those of a checkpoint or of `save_on_cpu`, get the
    arguments of the call and what the bodies of all ranks save. PyTorch refuses `torch.func.grad`,
    `vjp`, `jacrev` and `hessian` under such hooks, and so in such a body.

    Under `torch.compile` a call on a rank is a part of the graph; simulated ranks run uncompiled,
    and so do calls with the checks "values" and "collectives". Sizes of plain tensors may be
    symbols (`dynamic=None`, `True`): one graph serves all sizes that the ranks divide, and a
    collective on a tree then launches once for each tensor with symbols.
    A spec has integers as sizes, and programs, layouts and costs are planned for them: the best
    layouts of one size need not be those of another. Calls on pairs, of programs and of partitioned
    functions are a part of the graph while sizes are constant. Where they are symbols the graph
    ends before the call, which plans each size once and runs uncompiled, and what surrounds it is
    compiled once for all sizes. With `fullgraph=True` such calls have a graph for each spec, as
    `jax.jit` has for each shape: tensors that are padded to a few sizes take as many graphs,
    `mark_dynamic` and `mark_unbacked` raise, a warning comes with the last graph that
    `torch.compile(fn, recompile_limit=)` allows (8), and calls with further specs raise.
    A function that computes with tensors between reading or making specs (`pair.spec`, `fs.Spec`)
    is compiled for these specs: `fs.reshard(pair, fs.P(...))` needs none, and
    `torch.compiler.disable` is for a function that makes a program for each size.

    Graphs that `make_fx` records have functional collectives, in the same way. Simulated ranks
    refuse collectives in a graph that their body records. `torch.func.linearize` in a body that is
    simulated or checked records none: its function runs again, in forward mode.

    Semantics after `jax.shard_map` (JAX 0.11).

    >>> import torch
    >>> import fshard as fs
    >>> mesh = fs.Mesh(x=2)
    >>> @fs.shard_map(mesh=mesh, in_specs=(fs.P(None, "x"), fs.P("x")), out_specs=fs.P())
    ... def matmul(a, b):
    ...     return fs.psum(a @ b, "x")
    >>> matmul(torch.ones(2, 4), torch.ones(4, 3))
    tensor([[4., 4., 4.],
            [4., 4., 4.]])
    """
    where = "fs.shard_map"
    refuse_unknown_options(unknown, where)
    mesh = mapped_mesh(mesh, where)
    names = check_axis_names(axis_names, mesh, where)
    options: dict[str, Any] = {"redistribute_inputs": redistribute_inputs, "check": check}
    return map_function(fn, where, mesh, in_specs, out_specs, names, **options)


def local_map(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    in_specs: Any = None,
    out_specs: Any,
    mesh: Mesh | None = None,
    redistribute_inputs: bool = False,
) -> Any:
    """Map a function of locals over pairs, on the pairs' own mesh; call or decorator form.

    Args:
        fn: the function of local tensors; without it, a decorator is returned.
        in_specs: as in `shard_map`, but None, for all arguments or as a leaf, takes a pair's local
            in the pair's layout; other values pass through.
        out_specs: as in `shard_map`.
        mesh: the mesh, for calls without a pair, whose results are global tensors. None takes the
            pairs' mesh.
        redistribute_inputs: as in `shard_map`.

    Returns:
        The mapped function: pairs in, pairs out. All axes of the mesh are mapped, and nothing is
        checked (`check=False`). In the body of a `shard_map` the axes mapped around it can still
        be named, if the pairs' mesh is a part of its mesh.

    Raises:
        ShardingError: pairs of several meshes, neither a pair nor a mesh, and as `shard_map`.

    Gradients are those of `shard_map`. After `torch.distributed.tensor.experimental.local_map`.

    >>> import torch
    >>> import fshard as fs
    >>> pair = fs.shard(torch.arange(4.0), fs.Spec(fs.Mesh(x=2), fs.P("x"), shape=(4,)))
    >>> double = fs.local_map(lambda x: 2 * x, in_specs=fs.P("x"), out_specs=fs.P("x"))
    >>> fs.unshard(double(pair))
    tensor([0., 2., 4., 6.])
    """
    options: dict[str, Any] = {"redistribute_inputs": redistribute_inputs, "check": False}
    mesh = mapped_mesh(mesh, "fs.local_map")
    return map_function(fn, "fs.local_map", mesh, in_specs, out_specs, None, **options)
