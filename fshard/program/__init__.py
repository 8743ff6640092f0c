"""Programs of collectives as values: steps, typing, transposition, cost and bounds."""
