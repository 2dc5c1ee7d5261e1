"""`python -m tutti`: the command line."""

from tutti.cli import main

if __name__ == "__main__":
    main()
