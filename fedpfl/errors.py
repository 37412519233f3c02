"""The one exception meant for users."""


class FedpflError(Exception):
    """Something the user can mend. The message is one line: what is wrong, where, and what to do."""
