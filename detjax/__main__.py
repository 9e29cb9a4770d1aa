"""`python -m detjax` is the command `detjax`."""

from detjax.cli import app

if __name__ == "__main__":
    app()
