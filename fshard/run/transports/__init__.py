"""Transports: the collectives that one rank calls, each started at once and waited for later.

- `base`: the protocol `Transport`, the current rank, labels for errors, observers.
- `simulator`: ranks as threads of this process, one at a time; `fs.simulate`.
- `rank_threads`: the threads of the simulator.
- `torch_distributed`: ranks as processes, over gloo or NCCL; `fs.init`.
- `collective_batches`: rules of `torch.func.vmap` for functional collectives in recorded graphs.
- `divergence_check`: a transport of processes that compares calls before each launch.
- `rank_status`: positions of ranks, as the check writes them to the store.
- `agreement`: comparison of the first call of each layout or shape, through the store.
- `roll_call`: whether all ranks come to a place in their code, through the store.
- `process_end`: sockets by which a rank notices that the process of another has ended.
- `divergence_report`: fingerprints of calls, and the errors for ranks whose calls differ.
- `shape_only`: a transport for meta and fake tensors, which sends nothing.
- `raw_collectives`: collectives of PyTorch that bypass fshard, as events.
- `running_modules`: the modules whose forward runs, with their paths.
- `observed_calls`: reports of collectives to observers, with the line of the call.
- `reduce_dtypes`: reductions of dtypes that backends cannot reduce.
"""
