"""State of programs: random numbers by key."""
