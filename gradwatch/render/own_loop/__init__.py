"""React to findings in a loop of the user's own: print them, raise an error, or call a function."""
