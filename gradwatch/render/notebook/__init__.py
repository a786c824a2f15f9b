"""What a notebook shows of a run: a card and a plot."""
