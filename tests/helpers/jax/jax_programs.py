"""Random mapped functions as lists of instructions, run by the worlds of `jax_bodies.py`.

A program is drawn by Hypothesis from collectives and local operations, on meshes of sizes that
differ by axis. The states of its values (varying, reduced, unreduced, else invariant) are
inferred by JAX's rules, which determine the casts: a body runs with these casts written out, or
with inserted ones. A few programs break a rule, and must be refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st

from fshard import Mesh, P
from tests.helpers.jax.jax_bodies import Case

__all__ = ["Program", "case_of", "one_by_one", "programs", "run"]

Axes = tuple[str, ...]
Draw = Callable[[Any], Any]
MESHES = [Mesh(i=4), Mesh(x=2, y=2), Mesh(x=2, y=3), Mesh(x=1, y=2)]
MAX_NUMEL = 150


@dataclass(frozen=True)
class Value:
    """Local shape of a value, and the axes along which it is not invariant."""

    shape: tuple[int, ...]
    varying: frozenset[str] = frozenset()
    reduced: frozenset[str] = frozenset()
    unreduced: frozenset[str] = frozenset()

    def state(self, axis: str) -> str:
        for word in ("varying", "reduced", "unreduced"):
            if axis in getattr(self, word):
                return word
        return "invariant"


@dataclass(frozen=True)
class Step:
    """Instruction: operation, operands, and the casts to varying that it needs."""

    op: str
    args: tuple[int, ...]
    options: tuple[tuple[str, Any], ...] = ()
    casts: tuple[tuple[int, Axes, str], ...] = ()

    def __str__(self) -> str:
        given = [f"v{index}" for index in self.args] + [f"{k}={v!r}" for k, v in self.options]
        return f"{self.op}({', '.join(given)})"


@dataclass(frozen=True)
class Program:
    """Inputs (local shapes and specs), instructions, results, and a gradient taken inside.

    The last input is closed over if `closed`.
    """

    mesh: Mesh
    inputs: tuple[tuple[tuple[int, ...], P], ...]
    steps: tuple[Step, ...]
    outs: tuple[tuple[int, P], ...]
    inner: tuple[int, tuple[int, ...]] | None
    legal: bool
    closed: bool

    def __str__(self) -> str:
        lines = [f"{self.mesh}", *(f"v{index}: {item}" for index, item in enumerate(self.inputs))]
        lines += [f"v{index} = {s}" for index, s in enumerate(self.steps, len(self.inputs))]
        return "\n".join(
            [*lines, f"outs {self.outs}, inner {self.inner}, legal {self.legal}, {self.closed}"]
        )

    __repr__ = __str__


# -- running --------------------------------------------------------------------------------

OPS: dict[str, Callable[..., Any]] = {
    "add": lambda w, a, b: a + b,
    "sub": lambda w, a, b: a - b,
    "mul": lambda w, a, b: a * b,
    "matmul": lambda w, a, b: a @ b,
    "where": lambda w, a, b: w.where(a > 0, a, b),
    "concat": lambda w, a, b: w.concat([a, b], 0),
    "sin": lambda w, a: w.sin(a),
    "tanh": lambda w, a: w.tanh(a),
    "square": lambda w, a: a * a,
    "double": lambda w, a: 2.0 * a,
    "sum": lambda w, a, dim: a.sum(dim),
    "transpose": lambda w, a: a.T,
    "half": lambda w, a: a[: a.shape[0] // 2],
    "unsqueeze": lambda w, a: a[None],
    "place": lambda w, a, axes: a * (w.axis_index(axes) - 1.0),
    "pmax": lambda w, a, axes: w.pmax(w.stop(a), axes),
    "psum": lambda w, a, axes: w.psum(a, axes),
    "pmean": lambda w, a, axes: w.pmean(a, axes),
    "psum_scatter": lambda w, a, axes, **o: w.psum_scatter(a, axes, **o),
    "all_gather": lambda w, a, axes, **o: w.all_gather(a, axes, **o),
    "all_to_all": lambda w, a, axes, split, concat: w.all_to_all(
        a, axes, split, concat, tiled=True
    ),
    "ppermute": lambda w, a, axes, perm: w.ppermute(a, axes, perm),
    "pcast": lambda w, a, axes, src, to: w.pcast(a, axes, src=src, to=to),
}


def run(world: Any, program: Program, xs: Sequence[Any], casts: bool) -> list[Any]:
    """Return all values of a program, with its casts written out or not."""
    values = list(xs)
    for step in program.steps:
        args = [values[index] for index in step.args]
        for place, axes, src in step.casts if casts else ():
            args[place] = world.pcast(args[place], axes, src=src, to="varying")
        values.append(OPS[step.op](world, *args, **dict(step.options)))
    return values


def body_of(program: Program, casts: bool) -> Callable[..., Any]:
    def body(world: Any, *xs: Any) -> Any:
        values = run(world, program, xs, casts)
        results = []
        for index, spec in program.outs:
            named = {axis for dim in spec.dims for axis in dim}
            missing = tuple(sorted(named - value_states(program)[index].varying))
            out = values[index]
            results.append(world.pcast(out, missing, to="varying") if casts and missing else out)
        if program.inner:
            loss, chosen = program.inner

            def inside(*own: Any) -> Any:
                mine = list(xs)
                for index, x in zip(chosen, own, strict=True):
                    mine[index] = x
                return run(world, program, mine, casts)[loss].sum()

            results += world.grad(inside)(*(xs[index] for index in chosen))
        return tuple(results)

    return body


def case_of(program: Program, casts: bool) -> Case:
    """Return a program as a case, with arguments seeded by their index."""
    args = []
    for index, (shape, spec) in enumerate(program.inputs):
        sizes = [
            n * (program.mesh.axis_size(axes) if axes else 1)
            for n, axes in itertools.zip_longest(shape, spec.dims, fillvalue=())
        ]
        output = torch.rand(
            sizes, generator=torch.Generator().manual_seed(index), dtype=torch.float64
        )
        args.append(2 * output - 1)
    specs = tuple(spec for _, spec in program.inputs)
    inner = tuple(specs[index] for index in program.inner[1]) if program.inner else ()
    return Case(
        "random", program.mesh, specs[:-1] if program.closed else specs,
        (*(spec for _, spec in program.outs), *inner), tuple(args), body_of(program, casts),
        casts=casts, second=False, closed=int(program.closed), explicit=not program.closed,
    )  # fmt: skip


def one_by_one(case: Case) -> Case:
    """Return the case mapped along the last axis within a map along the others."""
    *first, last = case.mesh.axes

    def along(p: P, axes: Sequence[str]) -> P:
        dims = [[axis for axis in dim if axis in axes] for dim in p.dims]
        reduced, unreduced = ({*named} & {*axes} for named in (p.reduced, p.unreduced))
        return P(*dims, reduced=reduced, unreduced=unreduced)

    def body(world: Any, *xs: Any) -> Any:
        sharded = len(case.in_specs)
        ins, outs = (
            tuple(along(p, [last]) for p in specs) for specs in (case.in_specs, case.out_specs)
        )
        inner = world.nest(lambda *own: case.body(world, *own, *xs[sharded:]), ins, outs, {last})
        return inner(*xs[:sharded])

    ins, outs = (tuple(along(p, first) for p in specs) for specs in (case.in_specs, case.out_specs))
    return replace(case, in_specs=ins, out_specs=outs, body=body, axes={*first})


# -- states ---------------------------------------------------------------------------------


def value_states(program: Program) -> list[Value]:
    """Return the shapes and states of all values of a program."""
    values = [input_value(*item) for item in program.inputs]
    for step in program.steps:
        options = dict(step.options)
        args = [values[index] for index in step.args]
        values.append(result_of(step.op, args, options, program.mesh)[0])
    return values


def input_value(shape: tuple[int, ...], spec: P) -> Value:
    return Value(shape, frozenset(axis for dim in spec.dims for axis in dim))


def result_of(
    op: str, args: Sequence[Value], options: dict[str, Any], mesh: Mesh
) -> tuple[Value, tuple[tuple[int, Axes, str], ...]]:
    """Return the value of an instruction, and the casts of its operands."""
    if op in ("add", "sub", "mul", "matmul", "where", "concat"):
        return joined(op, args)
    (value,) = args
    axes: Axes = options.get("axes", ())
    shape, varying = value.shape, value.varying
    if op in ("psum", "pmean", "pmax"):
        saved = {word: getattr(value, word) - {*axes} for word in STATES}
        return Value(shape, **saved), cast_to(args, 0, axes)
    if op == "pcast":
        moved = {word: getattr(value, word) - {*axes} for word in STATES}
        moved[options["to"]] |= frozenset(axes)
        return Value(shape, **moved), ()
    if op == "place":
        return replace(value, varying=varying | {*axes}), cast_to(args, 0, axes)
    n = mesh.axis_size(axes) if axes else 1
    size = list(shape)
    after = varying | {*axes}
    if op == "sum":
        del size[options["dim"]]
    elif op == "transpose":
        size.reverse()
    elif op == "half":
        size[0] //= 2
    elif op == "unsqueeze":
        size.insert(0, 1)
    elif op == "psum_scatter":
        dim = options["scatter_dimension"]
        if options["tiled"]:
            size[dim] //= n
        else:
            del size[dim]
    elif op == "all_gather":
        dim = options["axis"]
        if options["tiled"]:
            size[dim] *= n
        else:
            size.insert(dim, n)
        if options["to"] != "varying":
            after = varying - {*axes}
    elif op == "all_to_all":
        size[options["split"]] //= n
        size[options["concat"]] *= n
    reduced = frozenset(axes) if options.get("to") == "reduced" else frozenset()
    if not axes:
        return replace(value, shape=tuple(size)), ()
    left = value.unreduced - {*axes}
    return Value(tuple(size), after, value.reduced | reduced, left), cast_to(args, 0, axes)


STATES = ("varying", "reduced", "unreduced")


def joined(op: str, args: Sequence[Value]) -> tuple[Value, tuple[tuple[int, Axes, str], ...]]:
    """Return the result of an operation of two values, after casts to one state."""
    a, b = args
    varying = a.varying | b.varying
    both = a.reduced | b.reduced
    if op == "matmul":
        shape: tuple[int, ...] = (*a.shape[:-1], *b.shape[1:])
    elif op == "concat":
        shape = (a.shape[0] + b.shape[0], *a.shape[1:])
    else:
        shape = tuple(torch.broadcast_shapes(a.shape, b.shape))
    casts = cast_to(args, 0, tuple(sorted(varying))) + cast_to(args, 1, tuple(sorted(varying)))
    return Value(shape, varying, both - varying, a.unreduced | b.unreduced), casts


def cast_to(args: Sequence[Value], place: int, axes: Axes) -> tuple[tuple[int, Axes, str], ...]:
    """Return the casts of an argument to varying along `axes`; unreduced ones stay."""
    outputs = []
    for src in ("invariant", "reduced"):
        names = tuple(axis for axis in axes if args[place].state(axis) == src)
        if names:
            outputs.append((place, names, src))
    return tuple(outputs)


# -- drawing --------------------------------------------------------------------------------

Candidate = tuple[tuple[int, ...], dict[str, Any]]


def orders(mesh: Mesh) -> list[Axes]:
    """Return every choice of axes in every order."""
    return [c for n in range(1, len(mesh.axes) + 1) for c in itertools.permutations(mesh.axes, n)]


def is_plain(value: Value) -> bool:
    return not value.reduced and not value.unreduced


def fits(op: str, a: Value, b: Value) -> bool:
    """Return True if shapes and states of two values can be joined."""
    if a.unreduced or b.unreduced:
        return op == "add" and a == b
    for axis in a.reduced | b.reduced:
        if "invariant" in (a.state(axis), b.state(axis)):
            return False
    if op == "matmul":
        return len(a.shape) == 2 and len(b.shape) in (1, 2) and a.shape[1] == b.shape[0]
    if op == "concat":
        return bool(a.shape) and len(a.shape) == len(b.shape) and a.shape[1:] == b.shape[1:]
    try:
        torch.broadcast_shapes(a.shape, b.shape)
    except RuntimeError:
        return False
    return True


def local_candidates(values: Sequence[Value]) -> Iterator[tuple[str, Candidate]]:
    for (i, a), (j, b) in itertools.product(enumerate(values), repeat=2):
        for op in ("add", "sub", "mul", "matmul", "where", "concat"):
            if fits(op, a, b):
                yield op, ((i, j), {})
    for i, a in enumerate(values):
        for dim in range(len(a.shape)):
            yield "sum", ((i,), {"dim": dim})
        if len(a.shape) == 2:
            yield "transpose", ((i,), {})
        if a.shape and a.shape[0] > 1:
            yield "half", ((i,), {})
        if not a.unreduced:
            yield from ((op, ((i,), {})) for op in ("sin", "square", "double"))
        if is_plain(a):  # JAX takes the constant in its derivative as an invariant operand
            yield "tanh", ((i,), {})


def collective_candidates(
    values: Sequence[Value], mesh: Mesh, mixed: bool
) -> Iterator[tuple[str, Candidate]]:
    for (i, a), axes in itertools.product(enumerate(values), orders(mesh)):
        states = {a.state(axis) for axis in axes}
        n, dims = mesh.axis_size(axes), range(len(a.shape))
        even = states <= {"varying"} or states <= {"invariant"}
        reducible = (even and is_plain(a)) or states == {"unreduced"}
        if reducible or (mixed and is_plain(a)):
            yield "psum", ((i,), {"axes": axes})
            for dim, tiled in itertools.product(dims, (False, True)):
                size = a.shape[dim]
                if size == n or (tiled and size % n == 0):
                    yield "psum_scatter", (
                        (i,), {"axes": axes, "scatter_dimension": dim, "tiled": tiled},
                    )  # fmt: skip
        if not is_plain(a):
            if states == {"reduced"}:
                yield "pcast", ((i,), {"axes": axes, "src": "reduced", "to": "varying"})
            continue
        if even or mixed:
            yield "pmean", ((i,), {"axes": axes})
        if even:  # in other states JAX 0.10 accepts operands of pmax that psum refuses
            yield "pmax", ((i,), {"axes": axes})
        yield "place", ((i,), {"axes": axes})
        for dim, tiled in itertools.product(range(len(a.shape) + 1), (False, True)):
            if dim < len(a.shape) + (not tiled):
                more = ("invariant", "reduced") if states == {"varying"} else ()
                for to in ("varying", *more):
                    yield "all_gather", (
                        (i,), {"axes": axes, "axis": dim, "tiled": tiled, "to": to},
                    )  # fmt: skip
        for split, concat in itertools.product(dims, dims):
            if a.shape[split] % n == 0:
                yield "all_to_all", ((i,), {"axes": axes, "split": split, "concat": concat})
        if list(axes) == sorted(axes):  # the only order in JAX
            for perm in ([(index, (index + 1) % n) for index in range(n)], [(0, n - 1)]):
                yield "ppermute", ((i,), {"axes": axes, "perm": perm})
        if states == {"invariant"}:
            yield "pcast", ((i,), {"axes": axes, "src": "invariant", "to": "varying"})
            yield "pcast", ((i,), {"axes": axes, "src": "invariant", "to": "reduced"})
        if states == {"varying"}:
            yield "pcast", ((i,), {"axes": axes, "src": "varying", "to": "unreduced"})


def draw_spec(draw: Draw, axes: Sequence[str], ndim: int) -> list[list[str]]:
    """Draw a dim for each of `axes`."""
    dims: list[list[str]] = [[] for _ in range(ndim)]
    for axis in draw(st.permutations(list(axes))):
        dims[draw(st.integers(0, ndim - 1))].append(axis)
    return dims


def out_spec(draw: Draw, mesh: Mesh, value: Value, legal: bool) -> P:
    """Draw an out spec for a value; if not `legal`, one that its states do not show."""
    named = sorted(value.varying)
    if not legal and named:
        named.remove(draw(st.sampled_from(named)))
    if value.shape and is_plain(value):
        left = [axis for axis in mesh.axes if axis not in value.varying]
        named += [axis for axis in left if draw(st.integers(0, 3)) == 0]
    dims = draw_spec(draw, named, len(value.shape)) if value.shape else []
    return P(*dims, reduced=value.reduced, unreduced=value.unreduced)


@st.composite
def programs(draw: Draw, legal: bool = True) -> Program:
    """Draw programs that obey the rules, or break one in a result or a reduction."""
    mesh = draw(st.sampled_from(MESHES))
    inputs = []
    for _ in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.sampled_from([1, 2, 4, 6]), min_size=1, max_size=2)))
        named = [axis for axis in mesh.axes if draw(st.integers(0, 2))]
        inputs.append((shape, P(*draw_spec(draw, named, len(shape)))))
    values, steps = [input_value(*item) for item in inputs], []
    breaks = not legal and draw(st.booleans())  # else an out spec is not shown
    broken = False

    def append(op: str, args: tuple[int, ...], options: dict[str, Any]) -> None:
        value, casts = result_of(op, [values[index] for index in args], options, mesh)
        values.append(value)
        steps.append(Step(op, args, tuple(options.items()), casts))

    for _ in range(draw(st.integers(1, 6))):
        outputs: dict[str, list[Candidate]] = {}
        for op, (args, options) in itertools.chain(
            local_candidates(values), collective_candidates(values, mesh, breaks)
        ):
            value = result_of(op, [values[index] for index in args], options, mesh)[0]
            if torch.Size(value.shape).numel() <= MAX_NUMEL:
                outputs.setdefault(op, []).append((args, options))
        op = draw(st.sampled_from(sorted(outputs)))
        args, options = draw(st.sampled_from(outputs[op]))
        states = {values[args[0]].state(axis) for axis in options.get("axes", ())}
        broken |= op in ("psum", "pmean", "psum_scatter") and len(states) > 1
        append(op, args, options)
    outs = []
    for index in sorted({len(values) - 1, draw(st.integers(0, len(values) - 1))}):
        if values[index].unreduced and values[index].varying and not values[index].shape:
            continue
        place = index
        if not values[index].shape and values[index].varying:
            append("unsqueeze", (index,), {})
            place = len(values) - 1
        promises = not legal and not breaks and not broken and bool(values[place].varying)
        outs.append((place, out_spec(draw, mesh, values[place], not promises)))
        broken |= promises
    plain = [index for index, value in enumerate(values) if is_plain(value)]
    inner = None
    if draw(st.booleans()):
        chosen = draw(st.lists(st.integers(0, len(inputs) - 1), min_size=1, unique=True))
        inner = (draw(st.sampled_from(plain)), tuple(sorted(chosen)))
    typed = any(value.reduced or value.unreduced for value in values)
    # JAX 0.10 fails for inner gradients of closures.
    free = len(inputs) > 1 and not typed and not (inner and len(inputs) - 1 in inner[1])
    closed = free and not inputs[-1][1].axes and draw(st.booleans())
    return Program(mesh, tuple(inputs), tuple(steps), tuple(outs), inner, not broken, closed)
