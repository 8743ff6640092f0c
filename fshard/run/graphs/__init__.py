"""Programs and collectives in graphs of `torch.compile`.

- `graph_node`: functions that are one node of a graph.
- `blocks`: programs on tensors whose sizes are symbols there.
"""
