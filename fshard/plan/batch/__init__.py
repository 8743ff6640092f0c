"""Batches: programs of a tree of specs planned and launched together.

- `batch`: the value, its text and its cost
- `coalesce`: buckets, rounds and launches
- `plan_batch`: the choice of each leaf's program
"""
