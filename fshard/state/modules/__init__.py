"""Modules of one device on a mesh, unchanged.

- `functional`: a module as a pure function of its parameters and buffers.
- `distributed_module`: `distribute_module`, its partition and its sharded state.
- `module_attributes`: errors for methods of modules on a distributed one.
- `parallel_styles`: `colwise`, `rowwise`, `sequence` and others: layouts of a module as data.
- `model_rules`: rules for the parameters of models of transformers.
- `broadcast`: `sync_module`, the values of one rank on all.
"""
