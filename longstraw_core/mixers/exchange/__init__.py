"""What token mixers exchange between ranks: who owns what, collectives, and the bytes they move. Knows no model."""
