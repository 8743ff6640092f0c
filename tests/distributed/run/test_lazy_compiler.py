"""`torch._dynamo`, whose import takes a second, is imported by its first use alone."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import os, sys
import torch, torch.distributed as dist
import fshard as fs
from fshard import Mesh, P, Spec
from torch.testing._internal.distributed.fake_pg import FakeStore

mesh, real = Mesh(i=2), os.fork() == 0
if not real and os.wait()[1]:
    sys.exit("rank 0 of two has failed")
src = Spec(mesh, P("i"), shape=(4, 4))
prog = fs.redistribute(src, src.replace(partition=P(None, "i")))
if real:
    os.environ.update(RANK="0", WORLD_SIZE="2")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    fs.init(mesh)
x = torch.ones(4, 4, requires_grad=True)

def body(x):
    wide = fs.all_gather(x, "i", axis=1, tiled=True)
    y = fs.psum(x, "i") + fs.psum_scatter(wide, "i", tiled=True).sum()
    return fs.all_to_all(y * fs.pmax(x.detach(), "i"), "i", 0, 1, tiled=True)

for check in (True, False):
    f = fs.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check=check)
    for _ in range(3):
        f(x).sum().backward()
for _ in range(3):
    pair = fs.reshard((prog(fs.shard(x, src).local), prog.dst), P(unreduced={"i"}))
    product = fs.apply(torch.matmul, fs.shard(x, src), fs.shard(x, mesh, P()))
    (fs.unshard(pair) + fs.unshard(product)).sum().backward()
assert "torch._dynamo" not in sys.modules
if real:
    os._exit(0)

def branches(x, w):  # varies, and does not
    return torch.cond(w.sum() > 0, lambda x, w: (x * w).sin(), lambda x, w: x + w, (x, w))

def compiled(x, w):
    return torch.compile(lambda x, w: (x * w).tanh(), backend="eager")(x, w)

w = torch.ones(4, requires_grad=True)
for fn in (branches, compiled):
    f = fs.shard_map(fn, mesh=mesh, in_specs=(P("i"), P()), out_specs=P("i"))
    grads = torch.autograd.grad(f(x, w).sum(), (x, w))
    torch.testing.assert_close(grads, torch.autograd.grad(fn(x, w).sum(), (x, w)))
    assert "torch._dynamo.eval_frame" in sys.modules
    assert torch.compile.__module__ == "torch"
"""


def test_calls_do_not_import_the_compiler_and_its_first_use_in_a_body_is_right() -> None:
    """Check one of two ranks, in a forked process, and simulated ranks."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
