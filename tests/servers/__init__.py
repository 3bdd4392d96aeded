"""Object-store servers on loopback that tests and benchmarks start from this project's own files."""
