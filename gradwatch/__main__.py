"""`python -m gradwatch` is `gradwatch`."""

import sys

from gradwatch.cli import main

if __name__ == "__main__":
    sys.exit(main())
