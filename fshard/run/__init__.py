"""Running programs: two transports, one interpreter, one autograd rule."""
