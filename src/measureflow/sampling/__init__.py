"""Draws of a posterior in one call, with nothing to tune."""
