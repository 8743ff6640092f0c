"""Private PyTorch: no other folder uses an underscored name of PyTorch.

`torch.ops.*` counts as public, including `_c10d_functional` in `run/transports/torch_distributed`
and `run/capture`. Builtins that run in hot paths are re-exported under a good name, so that they
cost no Python call.

- `autograd_state`: grad mode, autocast, running backward passes, views.
- `functorch`: transforms of `torch.func`, fast `autograd.Function.apply`.
- `forward_level`: the level of forward mode, shared by simulated ranks.
- `legacy_vmap`: batches of `torch.autograd.grad(is_grads_batched=True)`.
- `modes`: function modes, dispatch modes.
- `thread_state`: per-thread settings that move to another thread.
- `operators`: `OpOverload`, schemas, decompositions, direct functions, steps of AdamW.
- `fake_tensors`: fake tensors, functional tensors.
- `module_state`: children and dictionaries of modules, metas of tensors, versions of dicts.
- `symbolic_numbers`: numbers that are symbols in a trace.
- `init_functions`: `torch.nn.init.trunc_normal_`.
- `memory`: storages, results that must not alias arguments, flat buffers that are used again.
- `saved_tensors`: hooks of saved tensors, references to storages.
- `checkpointing`: `torch.utils.checkpoint`'s second forward pass.
- `dynamo`: functions that `torch.compile` skips, calls while tracing or takes as nodes; constants;
  operators that take functions, such as `torch.cond`, as plain functions.
- `process_groups`: process groups, stores and placements of `torch.distributed`.
"""

import torch

SUPPORTED = "2.13", "2.14"


def check_version(version: str) -> None:
    """Raise `ImportError` for a version of PyTorch that the tests have not passed with.

    Private parts change between versions: under 2.14 the tracer's default drops `detach`.
    """
    if ".".join(version.split(".")[:2]) not in SUPPORTED:
        raise ImportError(
            f"import fshard\n  given: PyTorch {version}\n"
            f"  rule:  the version must be {' or '.join(SUPPORTED)}: fshard traces functions with "
            "parts of PyTorch that change between versions, and gradients may be others\n"
            f"  fix:   pip install 'torch=={SUPPORTED[-1]}.*'"
        )


check_version(torch.__version__)
