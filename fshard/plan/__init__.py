"""Planning: the program of collectives between two specs."""
