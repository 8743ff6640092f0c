"""Rules of this family: to be written."""
