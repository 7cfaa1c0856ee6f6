"""Which models a sequence can be divided for."""
