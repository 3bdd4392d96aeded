"""How a store is verified: reading, receipts, what they reach, chains and completeness, one module each."""
