"""Interrupt a training after some steps."""


class After:
    """Stands in for Ctrl-C: asks the loop to end once it has made so many steps."""

    def __init__(self, steps):
        self.left = steps

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    @property
    def requested(self):
        self.left -= 1
        return self.left == 0
