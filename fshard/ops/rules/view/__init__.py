"""Rules of views, concatenations, windows and diagonals."""
