"""Load tests and speed comparisons, run by hand."""
