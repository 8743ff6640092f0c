"""Layouts of one operation call: roles of mesh axes, strategies, and the call on one rank.

- `axis_roles`: the roles that a rule offers to one mesh axis, and the states they require.
- `strategy`: `Strategy`, one choice of roles with its specs, programs and cost.
- `local_call`: the operation on the locals of one rank.
"""
