"""What a user can mend."""


class InputError(ValueError):
    """Bad input: which file, which column, and the remedy. Commands exit with 2, and nothing is written."""
