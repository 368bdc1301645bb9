"""The one driver: the loop, what it records and keeps, batches, devices, signals, checkpoints."""
