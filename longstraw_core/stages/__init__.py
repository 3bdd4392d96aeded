"""The stages of a transaction: each reads verified inputs, calls the packages below, writes outputs and its receipt."""
