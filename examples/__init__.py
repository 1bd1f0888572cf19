"""Examples for users; the tests use some of their parts."""
