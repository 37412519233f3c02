"""Train the same task in different ways: plainly, by bare kernels, by fedpfl itself."""
