"""Networks as pure functions, the laws of their outputs, and losses."""
