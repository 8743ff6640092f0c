"""Command line `python -m fshard SRC DST --mesh dp=2,tp=4`: plan a redistribution and print it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console

from fshard import Mesh, ShardingError, Topology, parse, redistribute, visualize
from fshard._util.errors import did_you_mean, fail
from fshard._util.text import WIDTH

MACHINES = {
    "dgx-a100": Topology.dgx_a100,
    "dgx-h100": Topology.dgx_h100,
    "gb200-nvl72": Topology.gb200_nvl72,
    "tpu-v4": Topology.tpu_v4,
    "tpu-v5e": Topology.tpu_v5e,
    "tpu-v5p": Topology.tpu_v5p,
    "tpu-v6e": Topology.tpu_v6e,
    "cpu-host": Topology.cpu_host,
}
NAMES = ("node", "cluster", *MACHINES)

EXAMPLE = """\
example:
  python -m fshard "f32[1024@dp,512@tp]" "f32[1024,512@(dp,tp)]" --mesh dp=2,tp=4

A layout is dtype[size@axis,size@(major,minor),size], then its unreduced and reduced axes:
  "f32[8@dp,16]{unreduced: tp}"     every rank of tp has a partial sum
  "bf16[6@dp:5+1,4]"                shards of 5 and 1 rows
  "f32[10@tp:chunk]{reduced: dp}"   shards of the sizes of torch.chunk
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status: 0, or 2 for a `ShardingError`."""
    options = _parser().parse_args(arguments)
    try:
        _show(options)
    except ShardingError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fshard",
        description="Plan the program of collectives from one layout to another, and print both\n"
        "layouts, the program, its cost, and the lower bound.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("src", help="source layout")
    parser.add_argument("dst", help="target layout")
    parser.add_argument("--mesh", required=True, metavar="dp=2,tp=4", help="axes and their sizes")
    parser.add_argument("--topology", default="node", metavar="NAME",
                        help=f"topology of the cost model: {', '.join(NAMES)}, or a file that "
                             "fs.calibrate saved, x.json (default: node)")  # fmt: skip
    parser.add_argument("--node-size", type=int, metavar="N",
                        help="devices per node of a cluster (default: 8)")  # fmt: skip
    parser.add_argument("--objective", choices=("time", "bytes"), default="time",
                        help="quantity to minimize (default: time)")  # fmt: skip
    parser.add_argument("--max-memory", type=int, metavar="BYTES",
                        help="limit of memory on every rank")  # fmt: skip
    return parser


def _show(options: argparse.Namespace) -> None:
    """Print both layouts and the program from one to the other."""
    mesh = _mesh(options.mesh)
    topology = _topology(options.topology, options.node_size)
    src, dst = parse(options.src, mesh), parse(options.dst, mesh)
    prog = redistribute(src, dst, topology=topology, objective=options.objective,
                        max_memory=options.max_memory)  # fmt: skip
    console = Console(highlight=False)
    width = min(WIDTH, console.width)
    for value in (visualize(src), visualize(dst), prog.explain()):
        if console.is_terminal:
            console.print(value, width=width, end="\n\n")
        else:
            sys.stdout.write(f"{value.text(width)}\n\n")


def _mesh(text: str) -> Mesh:
    """Return the mesh of a text such as `dp=2,tp=4`."""
    grid: dict[str, int] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        axis, _, size = map(str.strip, part.partition("="))
        if axis in grid or not size.isdecimal():
            fail("--mesh", f"{part!r} in {text!r}", "a mesh must read axis=size,axis=size, each "
                 "axis once", "--mesh dp=2,tp=4, say")  # fmt: skip
        grid[axis] = int(size)
    return Mesh(grid)


def _topology(name: str, node_size: int | None) -> Topology:
    """Return the topology of the options `--topology` and `--node-size`."""
    if name == "node":
        if node_size is not None:
            fail("--node-size", f"{node_size} with the topology node", "a single node must have "
                 "all devices", "--topology cluster, or leave it out")  # fmt: skip
        return Topology.node()
    if name in MACHINES or name.endswith(".json"):
        if node_size is not None:
            fail("--node-size", f"{node_size} with the topology {name}", "the size of its nodes "
                 "must be the machine's", "--topology cluster, or leave it out")  # fmt: skip
        return MACHINES[name]() if name in MACHINES else Topology.load(name)
    if name != "cluster":
        fail("--topology", repr(name), f"a topology must be one of {', '.join(NAMES)}, or a file "
             "x.json", did_you_mean(name, NAMES, "--topology node"))  # fmt: skip
    if node_size is not None and node_size < 1:
        fail("--node-size", f"{node_size}", "a node must have at least 1 device", "--node-size 8")
    return Topology.cluster(8 if node_size is None else node_size)


if __name__ == "__main__":
    sys.exit(main())
