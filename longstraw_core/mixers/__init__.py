"""Token mixers over resident state: the only code that knows how tokens exchange information."""
