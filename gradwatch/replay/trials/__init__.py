"""Train changed configs briefly in a temporary folder and compare them."""
