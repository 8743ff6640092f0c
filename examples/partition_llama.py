"""Train a Llama of transformers on a mesh, from the layouts of its parameters alone.

    pip install -e ".[models]"
    python examples/partition_llama.py                        # 8 simulated devices in one process
    torchrun --nproc-per-node 4 examples/partition_llama.py   # 4 real processes, the same losses

`LAYOUTS` is all that is written for the mesh: patterns of parameter names, and the layout of
each. They are Megatron-LM's over the axis `tp`, with every parameter sharded over `dp` too, as in
FSDP. The model is that of the package, unchanged. A second one is trained without fshard, and the
script checks that both have the same losses.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Mapping

import torch
from torch import Tensor

import fshard as fs
from fshard import P

try:
    from transformers import LlamaConfig, LlamaForCausalLM
except ModuleNotFoundError:
    sys.exit('partition_llama.py needs transformers: pip install -e ".[models]"')

BATCH, LENGTH, WORDS = 16, 12, 24
LAYOUTS = [
    (r".*(embed_tokens|lm_head)\.weight", P("dp")),
    (r".*([qkv]_proj|gate_proj|up_proj)\.weight", P("tp", "dp")),
    (r".*(o_proj|down_proj)\.weight", P("dp", "tp")),
    (r".*norm\.weight", P("dp")),
]


def sentences(generator: torch.Generator) -> Tensor:
    """Return arithmetic sequences of words, `(batch, length)`."""
    first = torch.randint(WORDS, (BATCH, 1), generator=generator)
    step = torch.randint(1, 4, (BATCH, 1), generator=generator)
    return (first + step * torch.arange(LENGTH)) % WORDS


def main(steps: int) -> int:
    """Train both models and print their losses; return 0 if they agree, else 1."""
    mesh = fs.Mesh(dp=2, tp=int(os.environ.get("WORLD_SIZE", "8")) // 2)
    if "RANK" in os.environ:  # set by torchrun
        fs.init(mesh, backend="gloo")  # the tensors are on the CPU

    torch.manual_seed(0)  # the same parameters in every process
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=LENGTH,
    )).double()  # fmt: skip
    twin = copy.deepcopy(model)

    def loss_of(params: Mapping[str, Tensor], text: Tensor) -> Tensor:
        outputs = torch.func.functional_call(model, dict(params), (text,), {"labels": text})
        loss: Tensor = outputs.loss
        return loss

    values = {name: p.detach() for name, p in model.named_parameters()}
    layouts = fs.state.match_rules(LAYOUTS, values, mesh=mesh)
    params = fs.state.tree_shard(values, layouts, mesh=mesh)
    shards = [shard for pair in params.values() for shard in trainable_shards(pair)]
    partitioned = fs.partition(loss_of, mesh=mesh, in_specs=(None, P("dp")), out_specs=P())

    optimizers = [torch.optim.AdamW(p, lr=0.003) for p in (shards, twin.parameters())]
    generator = torch.Generator().manual_seed(0)
    is_first_rank = os.environ.get("RANK", "0") == "0"
    max_difference = 0.0
    for step in range(1, steps + 1):
        text = sentences(generator)
        with fs.comm_log() as log:
            losses = [fs.unshard(partitioned(params, text)), twin(text, labels=text).loss]
            for loss, optimizer in zip(losses, optimizers, strict=True):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        sharded, single = (loss.item() for loss in losses)
        max_difference = max(max_difference, abs(sharded - single))
        if is_first_rank and (step == 1 or step % 10 == 0):
            print(f"step {step:4}  loss {sharded:.6f}  one device {single:.6f}")
    if is_first_rank:
        print(f"Communicated in one step, on {mesh}:", log, sep="\n")
        print(f"Losses differ by at most {max_difference:.1e}.")
    return int(max_difference > 1e-5)  # norms and logits are float32


def trainable_shards(pair: fs.Sharded) -> list[Tensor]:
    """Return the shards of a pair in this process, with `requires_grad` set."""
    shards = [pair.local] if isinstance(pair.local, Tensor) else pair.local
    return [shard.requires_grad_() for shard in shards]


if __name__ == "__main__":
    sys.exit(main(steps=int(sys.argv[1]) if len(sys.argv) > 1 else 50))
