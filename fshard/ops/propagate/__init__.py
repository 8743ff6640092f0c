"""`fs.propagate`: the choice of a strategy for one operation call.

- `propagate`: the public function, the overload and the rule of a call.
- `select`: the search for the fastest combination of roles.
- `axis_options`: the roles that each axis can take in a call, with their costs.
- `choice_hints`: requested layouts and roles, and launches that calls share.
- `role_costs`: closed-form times of one role on one axis.
- `foreach`: operations on lists of tensors, element by element.
"""
