"""`python -m detjax` is the command `detjax`."""

from detjax.cli import main

if __name__ == "__main__":
    main()
