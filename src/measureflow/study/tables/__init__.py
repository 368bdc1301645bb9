"""The study on tables: ours beside rivals on many tables, with seconds beside scores."""
