"""What a model of a given shape needs in memory, work and traffic: arithmetic, without torch or I/O."""
