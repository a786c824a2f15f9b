"""Training steps with planted mistakes, and right ones that are hard to tell from them."""
