"""The tests of fshard."""
