"""Shardy's text of meshes and shardings, as lowered programs of JAX print them, and back.

| fshard | Shardy |
|---|---|
| `Mesh(dp=2, tp=4)` | `sdy.mesh @mesh = <["dp"=2, "tp"=4]>` |
| `P("dp", None)` | `#sdy.sharding<@mesh, [{"dp"}, {}]>` |
| `P(unreduced={"dp"})` | `#sdy.sharding<@mesh, [{}], unreduced={"dp"}>` |

Shardy pads a dim that does not divide: all shards but the last ones have the same size.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from fshard._util.errors import Problem, fail, raise_if
from fshard.layout.mesh import Mesh, as_mesh, read_device_mesh
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.spec import Spec

DTYPES = {
    "f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16,
    "i64": torch.int64, "i32": torch.int32, "i16": torch.int16, "i8": torch.int8,
    "ui64": torch.uint64, "ui32": torch.uint32, "ui16": torch.uint16, "ui8": torch.uint8,
    "i1": torch.bool, "complex<f32>": torch.complex64, "complex<f64>": torch.complex128,
    "f8E4M3FN": torch.float8_e4m3fn, "f8E5M2": torch.float8_e5m2,
}  # fmt: skip
"""Dtypes by their text in MLIR."""


def to_shardy(value: Mesh | Spec, /, *, mesh_name: str = "mesh") -> str:
    """Return a mesh or the sharding of a spec as Shardy prints it.

    Args:
        value: the mesh or spec.
        mesh_name: the name of the mesh.

    Returns:
        The operation `sdy.mesh`, or the attribute `#sdy.sharding`, which has no shape and dtype.

    Raises:
        ShardingError: Shardy has no such mesh or layout: devices other than `0..n-1` in some order,
            axes that are reduced, reductions other than sums, shards of other sizes; lists all.

    >>> import fshard as fs
    >>> mesh = fs.Mesh(dp=2, tp=4)
    >>> print(fs.interop.to_shardy(mesh))
    sdy.mesh @mesh = <["dp"=2, "tp"=4]>
    >>> print(fs.interop.to_shardy(fs.Spec(mesh, fs.P(("tp", "dp")), shape=(8, 16))))
    #sdy.sharding<@mesh, [{"tp", "dp"}, {}]>
    """
    where = "fs.interop.to_shardy"
    value = read_device_mesh(value)
    if isinstance(value, Mesh):
        return f"sdy.mesh @{mesh_name} = <{_mesh_text(where, value)}>"
    if not isinstance(value, Spec):
        fail(where, f"a {type(value).__name__}", "the argument must be a Mesh or a Spec",
             "the spec of a pair: fs.interop.to_shardy(pair.spec)")  # fmt: skip
    partition = value.partition
    problems = [
        Problem(f"{axis!r} reduced in {value}", "Shardy must not have axes that are reduced",
                "spec.replace(partition=...) with the axis unmentioned: the values are the same")
        for axis, _ in partition.reduced_kinds
    ] + [
        Problem(f"{axis!r} unreduced by {kind} in {value}", "axes must be unreduced by sum",
                "fs.redistribute to another layout first")
        for axis, kind in partition.unreduced_kinds if kind != "sum"
    ]  # fmt: skip
    for dim, axes in enumerate(partition.dims):
        padded = _padded_sizes(value.shape[dim], value.mesh.axis_size(axes))
        if value.shard_sizes(dim) != padded:
            problems.append(Problem(
                f"the shard sizes {value.shard_sizes(dim)} of dim {dim} in {value}",
                f"the shard sizes must be {padded} in Shardy, which pads",
                f"spec.replace(sizes={{{dim}: {padded}}})"))  # fmt: skip
    raise_if(where, problems)
    dims = ", ".join(f"{{{_names(axes)}}}" for axes in partition.dims)
    unreduced = [axis for axis in value.mesh.axes if axis in dict(partition.unreduced_kinds)]
    end = f", unreduced={{{_names(unreduced)}}}" if unreduced else ""
    return f"#sdy.sharding<@{mesh_name}, [{dims}]{end}>"


def from_shardy(
    text: str,
    /,
    *,
    mesh: Mesh | None = None,
    shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
) -> Mesh | Spec:
    """Return the mesh or the spec of a text of Shardy.

    Args:
        text: an operation `sdy.mesh`, an attribute `#sdy.mesh` or `#sdy.sharding`, or a line of a
            program that has one sharding, such as an argument
            `tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}`.
        mesh: the mesh that a sharding names; one that the text has may be left out.
        shape: global shape, unless the text has one tensor type.
        dtype: dtype of the spec; by default that of the text, or `torch.float32`.

    Returns:
        A mesh for a mesh, a spec for a sharding.

    Raises:
        ShardingError: the text cannot be read, the mesh or the shape is missing, or fshard has no
            such layout: open dims, priorities, parts of an axis, a mesh of one device without axes.

    >>> import fshard as fs
    >>> mesh = fs.interop.from_shardy('sdy.mesh @mesh = <["dp"=2, "tp"=4]>')
    >>> mesh
    Mesh(dp=2, tp=4)
    >>> line = 'tensor<8x16xbf16> {sdy.sharding = #sdy.sharding<@mesh, [{"dp"}, {"tp"}]>}'
    >>> fs.interop.from_shardy(line, mesh=mesh)
    bf16[8@dp,16@tp]
    """
    where = "fs.interop.from_shardy"
    if found := re.search(r"(?:\bsdy\.mesh\s+@\S+\s*=|#sdy\.mesh)\s*(?=<)", text):
        return _Reader(where, text, found.end()).mesh()
    starts = [*re.finditer(r"<\s*(?=@|mesh\s*<)", text)]
    if len(starts) != 1:
        fail(where, f"a text with {len(starts)} shardings: {text[:60]!r}",
             "the text must have one mesh or one sharding",
             '#sdy.sharding<@mesh, [{"x"}, {}]>')  # fmt: skip
    inner, partition = _Reader(where, text, starts[0].start()).sharding()
    owner = inner if mesh is None else as_mesh(mesh, where)
    if owner is None or (inner is not None and inner != owner):
        fail(where, f"mesh={mesh} for {text[starts[0].start():][:60]!r}",
             "the mesh must be given, and be that of the text if the text has one",
             "mesh=fs.Mesh(dp=2, tp=4)")  # fmt: skip
    types = re.findall(r"tensor<((?:\d+x)*)([A-Za-z]\w*(?:<\w+>)?)>", text)
    if shape is None and len(types) == 1:
        shape = [int(size) for size in types[0][0].split("x")[:-1]]
    if shape is None:
        fail(where, text, "the global shape must be given, or one tensor type in the text",
             "shape=(8, 16)")  # fmt: skip
    if len(shape) != len(partition):
        fail(where, f"{partition} for the shape {tuple(shape)}",
             f"a sharding must have a dim for each of the {len(shape)} of the tensor",
             "the shape of the tensor that the text is of")  # fmt: skip
    if dtype is None:
        element = types[0][1] if len(types) == 1 else "f32"
        if element not in DTYPES:
            fail(where, f"the element type {element}", "the element type must be one of PyTorch's",
                 "dtype=torch.float32, say")  # fmt: skip
        dtype = DTYPES[element]
    sizes = {}
    for dim, axes in enumerate(partition.dims):
        if all(axis in owner.axes for axis in axes) and shape[dim] % (n := owner.axis_size(axes)):
            sizes[dim] = _padded_sizes(shape[dim], n)
    return Spec(owner, partition, shape=shape, dtype=dtype, sizes=sizes)


def _padded_sizes(size: int, count: int) -> tuple[int, ...]:
    """Return the shard sizes of a dim that is padded to a multiple of the number of shards."""
    most = -(-size // count)
    return tuple(min(most, max(0, size - most * index)) for index in range(count))


def _names(axes: Sequence[str]) -> str:
    return ", ".join(f'"{axis}"' for axis in axes)


def _mesh_text(where: str, mesh: Mesh) -> str:
    axes = ", ".join(f'"{axis}"={n}' for axis, n in mesh.shape.items())
    if mesh.devices == range(mesh.size):
        return f"[{axes}]"
    if sorted(mesh.devices) != [*range(mesh.size)]:
        fail(where, f"{mesh}", f"the devices must be 0..{mesh.size - 1}, in any order, in Shardy",
             f"fs.Mesh({dict(mesh.shape)})")  # fmt: skip
    return f"[{axes}], device_ids=[{', '.join(map(str, mesh.devices))}]"


TOKEN = re.compile(r'\s*("[^"]*"|@[\w$.-]+|[A-Za-z_#][\w.]*|\d+|\S)')


class _Reader:
    """Parser of one mesh or sharding in a text; every method consumes what it returns."""

    def __init__(self, where: str, text: str, position: int) -> None:
        self.where, self.text, self.position = where, text, position

    def peek(self) -> str:
        """Return the next token, an empty text at the end."""
        found = TOKEN.match(self.text, self.position)
        return found[1] if found else ""

    def take(self) -> str:
        """Consume and return the next token."""
        found = TOKEN.match(self.text, self.position)
        self.position = found.end() if found else len(self.text)
        return found[1] if found else ""

    def accept(self, token: str) -> bool:
        """Consume the next token if it is this one."""
        is_next = self.peek() == token
        if is_next:
            self.take()
        return is_next

    def expect(self, *tokens: str) -> None:
        """Consume these tokens; raise `ShardingError` for others."""
        for token in tokens:
            if self.peek() != token:
                fail(self.where, f"{self.peek()!r} at character {self.position} of {self.text!r}",
                     f"the text must have {token!r} there, as Shardy prints it",
                     '#sdy.sharding<@mesh, [{"x"}, {}]> or sdy.mesh @mesh = <["x"=2]>')  # fmt: skip
            self.take()

    def refuse(self, given: str, rule: str, fix: str) -> None:
        """Raise `ShardingError` for a part of the text that no spec has."""
        fail(self.where, f"{given} in {self.text!r}", rule, fix)

    def integer(self) -> int:
        """Return an integer."""
        token = self.peek()
        if not token.isdigit():
            self.expect("an integer")
        return int(self.take())

    def name(self) -> str:
        """Return the name of an axis."""
        if not self.peek().startswith('"'):
            self.expect('"')
        return self.take()[1:-1]

    def mesh(self) -> Mesh:
        """Return the mesh of `<["x"=2], device_ids=[1, 0]>`."""
        axes: dict[str, int] = {}
        devices: list[int] | None = None
        self.expect("<", "[")
        while not self.accept("]"):
            name = self.name()
            self.expect("=")
            axes[name] = self.integer()
            self.accept(",")
        if self.accept(","):
            self.expect("device_ids", "=", "[")
            devices = []
            while not self.accept("]"):
                devices.append(self.integer())
                self.accept(",")
        self.expect(">")
        if not axes:
            self.refuse("a mesh without axes", "a mesh must have axes", '<["x"=1]>')
        return Mesh(axes, devices=devices)

    def sharding(self) -> tuple[Mesh | None, PartitionSpec]:
        """Return the mesh if the text has it, and the partition, of `<@mesh, [{"x"}, {}]>`."""
        self.expect("<")
        mesh = None
        if self.accept("mesh"):
            mesh = self.mesh()
        else:
            self.take()
        self.expect(",", "[")
        dims: list[tuple[str, ...]] = []
        while not self.accept("]"):
            dims.append(self.axes())
            if (priority := self.peek()).startswith("p"):
                self.refuse(f"the priority {priority}", "a sharding must not have priorities",
                            "the text without it: priorities are for the propagation")  # fmt: skip
            self.accept(",")
        groups: dict[str, tuple[str, ...]] = {}
        while self.accept(","):
            kind = self.take()
            if kind not in ("replicated", "unreduced"):
                self.refuse(f"{kind!r}", "axes must be replicated or unreduced", 'unreduced={"x"}')
            self.expect("=")
            groups[kind] = self.axes()
        self.expect(">")
        return mesh, PartitionSpec(*dims, unreduced=groups.get("unreduced", ()))

    def axes(self) -> tuple[str, ...]:
        """Return the axes of `{"x", "y"}`."""
        axes: list[str] = []
        self.expect("{")
        while not self.accept("}"):
            if self.accept("?"):
                self.refuse("an open dim, {?}", "the axes of every dim must be stated",
                            '{} or {"x"}')  # fmt: skip
            axes.append(self.name())
            if self.accept(":"):
                self.expect("(")
                before = self.integer()
                self.expect(")")
                size = self.integer()
                self.refuse(f"the part :({before}){size} of axis {axes[-1]!r}",
                            "a dim must be sharded over whole axes",
                            f"a mesh with that axis: mesh.split({axes[-1]!r}, ...)")  # fmt: skip
            self.accept(",")
        return tuple(axes)
