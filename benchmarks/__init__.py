"""How fast measureflow is, always against something else in the same run. `make bench` runs all of it."""
