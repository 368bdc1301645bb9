"""The flow explorer: the paper's toys in a browser."""
