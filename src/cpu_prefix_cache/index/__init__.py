"""Which prefixes there are, and where one of them can be resumed."""
