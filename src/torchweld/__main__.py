"""`python -m torchweld`: the same as the `torchweld` command."""

from torchweld.cli.main import main

if __name__ == "__main__":
    main()
