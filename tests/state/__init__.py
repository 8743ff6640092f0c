"""Tests of factories, parameters, modules, optimizers and checkpoints."""
