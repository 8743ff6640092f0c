"""The search for the cheapest program between two layouts."""
