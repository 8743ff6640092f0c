"""Cost model: topologies, bytes, time and memory of steps and programs."""
